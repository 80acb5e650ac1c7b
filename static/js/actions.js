// What a person can do with a search: pause, resume, cancel, copy the request that makes it again.

import { setText } from "./dom.js";

/** One sentence from an answer that is not a success: the problem's detail where there is one. */
export async function problemSentence(response) {
  try {
    const problem = await response.json();
    if (problem.detail || problem.title) return problem.detail || problem.title;
  } catch {
    // not JSON: the status has to do
  }
  return `The server answered ${response.status}. Nothing was changed.`;
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
  let busy = null;
  let asked = null; // {name, status} until the status has moved

  async function post(name) {
    busy = name;
    alert.hidden = true;
    render(getView());
    const failed = await send(`${apiUrl}/${name}`, csrf);
    busy = null;
    if (failed) {
      setText(alert.querySelector("p"), failed);
      alert.hidden = false;
    } else {
      asked = { name, status: getView().status };
    }
    render(getView());
  }

  for (const [name, form] of Object.entries(forms)) {
    form.addEventListener("submit", (event) => {
      event.preventDefault();
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
    for (const [name, form] of Object.entries(forms)) {
      const button = form.querySelector("button");
      const focused = document.activeElement === button;
      form.hidden = !can[name];
      button.disabled = busy !== null || asked !== null;
      button.setAttribute("aria-busy", String(busy === name || asked?.name === name));
      if (focused && form.hidden)
        names
          .map((other) => forms[other])
          .find((other) => !other.hidden)
          ?.querySelector("button")
          .focus();
    }
  }
  return render;
}
