// What a person can do with a search: pause, resume, cancel, copy the request that makes it again.

import { setText } from "./dom.js";

/** One sentence from an answer that is not a success: the problem's detail where there is one. */
export async function problemSentence(response, consequence = "Nothing was changed.") {
  try {
    const problem = await response.json();
    if (problem.detail || problem.title) return problem.detail || problem.title;
  } catch {
    // not JSON: the status has to do
  }
  return `The server answered ${response.status}. ${consequence}`.trim();
}

/** A word safe inside single quotes of a POSIX shell. Pure. */
function shellQuote(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

/** The request that launches the same search again. Pure. */
export function curl(view, origin) {
  const { seconds, trials } = view.budget ?? {};
  const body = { deployment: view.deployment, budget: { seconds, trials } };
  if (Number.isInteger(view.seed)) body.seed = view.seed;
  return [
    `curl -X POST ${shellQuote(`${origin}/api/searches`)}`,
    `-H "Authorization: Bearer $SPECPILOT_TOKEN"`,
    `-H 'Content-Type: application/json'`,
    `-d ${shellQuote(JSON.stringify(body))}`,
  ].join(" \\\n  ");
}

/** Which buttons a status allows. Pure. */
export function allowed(status) {
  return {
    pause: status === "running",
    resume: status === "paused",
    cancel: status === "running" || status === "paused" || status === "queued",
  };
}

/** Posts; returns null, or the sentence that says why it did not work. */
async function send(url, csrf) {
  try {
    const headers = { "X-CSRFToken": csrf, Accept: "application/json" };
    const response = await fetch(url, { method: "POST", headers, credentials: "same-origin" });
    return response.ok ? null : await problemSentence(response);
  } catch {
    return "The server could not be reached. Nothing was changed; try again when the connection is back.";
  }
}

async function copy(text, button) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    setText(button, "Copied");
  } catch {
    setText(button, "Could not copy");
  }
  setTimeout(() => setText(button, label), 1800);
}

/** Wires every button with data-copy: it copies its own text, or the text of the element that it names. */
export function wireCopyButtons(root = document) {
  root.addEventListener("click", (event) => {
    const button = event.target.closest("[data-copy]");
    if (!button) return;
    const source = document.getElementById(button.dataset.copy);
    copy(source.textContent.trim(), button);
  });
}

/**
 * Wires the forms of the live page (they work without scripts too, by plain POST); returns `render(view)`.
 * `apiUrl` + "/pause" and so on are what the buttons call.
 */
export function createActions({ root, apiUrl, csrf, getView }) {
  const names = ["pause", "resume", "cancel"];
  const forms = Object.fromEntries(names.map((name) => [name, root.querySelector(`form[data-action="${name}"]`)]));
  const alert = document.getElementById("action-error");
  const dialog = document.getElementById("cancel-dialog");
  let asked = null; // {name, status}: what was asked for, and the status it was asked in, until that has moved

  async function post(name) {
    asked = { name, status: getView().status };
    alert.hidden = true;
    render(getView());
    const failed = await send(`${apiUrl}/${name}`, csrf);
    if (!failed) return; // the event that tells of the change comes over the socket
    asked = null;
    setText(alert.querySelector("p"), failed);
    alert.hidden = false;
    render(getView());
  }

  for (const [name, form] of Object.entries(forms)) {
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (asked) return;
      if (name === "cancel") dialog.showModal();
      else post(name);
    });
  }
  dialog.addEventListener("close", () => {
    if (dialog.returnValue === "cancel") post("cancel");
    dialog.returnValue = "";
  });
  alert.querySelector("button").addEventListener("click", () => (alert.hidden = true));
  root
    .querySelector('[data-action="curl"]')
    .addEventListener("click", (event) => copy(curl(getView(), location.origin), event.currentTarget));

  function render(view) {
    if (asked && asked.status !== view.status) asked = null;
    const can = allowed(view.status);
    const buttons = names.map((name) => forms[name].querySelector("button"));
    const focused = buttons.indexOf(document.activeElement);
    for (const [i, name] of names.entries()) {
      forms[name].hidden = !can[name];
      // not `disabled`, which would take the focus away from whoever works by keyboard
      buttons[i].setAttribute("aria-disabled", String(asked !== null));
      buttons[i].setAttribute("aria-busy", String(asked?.name === name));
    }
    if (focused >= 0 && forms[names[focused]].hidden) buttons.find((_, i) => can[names[i]])?.focus();
  }
  return render;
}
