// The panel of one trial: its evidence, asked for when it is opened and again when its verdict comes in. Its address
// is its own, so a reload or a shared link opens it again.

import { problemSentence } from "./actions.js";
import { h, s, setText } from "./dom.js";
import * as e from "./evidence.js";
import * as f from "./format.js";
import { pairs } from "./figures/pairs.js";
import { dotPill, verdictPill } from "./glyphs.js";
import { createPlots } from "./plots.js";
import { chips } from "./table.js";
import { clip, runningText, tokenText } from "./visible.js";

const BEFORE = 700; // characters of text shown before a divergence
const AFTER = 240;
const TOKEN = 120;
const COST_TONES = ["series4", "series3", "series1", "series2", "line"];

/** Parts of visible.js as elements. */
function marked(parts) {
  return parts.map((part) => part.text ?? h("span", { class: "odd", title: part.name }, part.mark));
}

function token(side, text) {
  const shown = marked(tokenText(clip(text, TOKEN, "first")));
  return h("mark", { class: side }, h("span", { class: "sr" }, `${side}: `), shown);
}

function figuresTable(header, rows) {
  const head = header.map((name, i) => h("th", { scope: "col", class: i ? "num" : null }, name));
  const body = rows.map(([name, ...cells]) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, name),
      cells.map((cell) => h("td", { class: "num" }, cell)),
    ),
  );
  return h("table", {}, h("thead", {}, h("tr", {}, head)), h("tbody", {}, body));
}

function facts(rows) {
  return rows.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)));
}

/** Shares of a whole as one bar; `tone` names a class of app.css. */
function bar(parts) {
  const total = parts.reduce((sum, part) => sum + part.value, 0);
  const box = s("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", class: "shares", "aria-hidden": "true" });
  let at = 0;
  for (const { value, tone } of parts.filter((part) => part.value > 0)) {
    const width = Math.max(0.4, (value / total) * 100); // a single error must be seen
    box.append(s("rect", { x: Math.min(at, 100 - width), y: 0, width, height: 10, class: tone }));
    at += (value / total) * 100;
  }
  return box;
}

function verdictOf(evidence, ended) {
  if (evidence.status === "judged") return verdictPill(evidence.verdict);
  if (evidence.status === "running" && !ended) return dotPill("run", "Running");
  return dotPill("idle", ended ? "Not run" : "Waiting");
}

/** Wires the panel; returns `render(view)`. Links with data-trial anywhere in the page open it. */
export function createPanel({ dialog, apiUrl, pageUrl, searchName, first }) {
  const parts = new Map([...dialog.querySelectorAll("[data-part]")].map((part) => [part.dataset.part, part]));
  const part = (name) => parts.get(name);
  const plots = createPlots(searchName, [pairs]);
  let view = null;
  let open = null; // number of the trial that is shown
  let evidence = null; // what is known of it
  let asked = ""; // stamp of the candidate for which `evidence` was asked
  let request = null; // AbortController of the request in flight
  let pushed = false; // whether opening added an entry to the history

  const candidates = () => view?.candidates ?? [];
  const candidate = () => candidates().find((row) => row.trial === open);
  const ended = () => view?.status === "finished" || view?.status === "failed";

  function show(name, visible) {
    part(name).hidden = !visible;
    return visible;
  }

  // ---- what it shows

  function head() {
    const row = candidate() ?? evidence;
    setText(part("title"), `Trial ${open}`);
    const known = row ? `${row.status} ${row.verdict} ${ended()}` : "";
    if (part("verdict").dataset.mark !== known) {
      part("verdict").dataset.mark = known;
      part("verdict").replaceChildren(...(row ? [verdictOf(row, ended())] : []));
    }
    setText(part("kind"), row && row.kind !== "candidate" ? row.kind : "");
    const numbers = candidates().map((other) => other.trial);
    part("older").disabled = !numbers.some((number) => number < open);
    part("newer").disabled = !numbers.some((number) => number > open);
    if (evidence && row?.status !== "judged") setText(part("reason"), e.standing(evidence, row?.phase));
  }

  function verdictPart() {
    setText(part("reason"), evidence.status === "judged" ? evidence.reason : e.standing(evidence, candidate()?.phase));
    if (show("log", evidence.log.length > 0)) {
      part("log").querySelector("pre").replaceChildren(...marked(runningText(evidence.log.join("\n"))));
    }
    show("interruptions", evidence.interruptions.length > 0);
    part("interruptions").replaceChildren(
      ...evidence.interruptions.map((reason) => h("li", {}, `An attempt ended without a verdict: ${reason}`)),
    );
    part("changes").replaceChildren(...[chips(evidence.changes)].flat());
    show("rationale", Boolean(evidence.rationale));
    setText(part("rationale"), evidence.rationale);
    part("facts").replaceChildren(...facts(e.trialFacts(evidence)));
  }

  function forcingPart() {
    const { forcing } = evidence;
    if (!show("forcing", Boolean(forcing))) return;
    const three = e.counts(forcing);
    part("counts").replaceChildren(
      ...three.map(({ value, word, note, tone }) =>
        h("li", { class: tone }, h("b", {}, f.number(value)), h("span", {}, word), h("small", {}, note)),
      ),
    );
    part("share").replaceChildren(bar(three.map(({ value, tone }) => ({ value, tone }))));
    part("forcing-facts").replaceChildren(...facts(e.forcingFacts(forcing)));
    if (show("categories", evidence.categories.length > 0)) {
      const rows = evidence.categories.map((row) => [
        row.name || "no category",
        f.number(row.exact),
        f.number(row.near_tie),
        h("span", { class: row.error ? "error" : null }, f.number(row.error)),
      ]);
      part("categories").replaceChildren(figuresTable(["prompts", "exact", "near-tie", "error"], rows));
    }
    if (show("power", (forcing.power ?? []).length > 0)) {
      const rows = forcing.power.map((row) => [
        row.like || "noise of this size",
        e.logits(row.noise),
        e.chance(row.detected),
      ]);
      part("power").replaceChildren(figuresTable(["what the gate would have seen", "noise, logits", "detected"], rows));
    }
  }

  function divergencePart() {
    const { place, forcing } = evidence;
    if (!show("divergence", Boolean(place))) return;
    const { divergence: first, words } = place;
    const kind = first.near_tie ? "a near-tie" : "an error";
    const where = `prompt ${first.prompt}${first.category ? ` (${first.category})` : ""}, token ${first.position + 1}`;
    setText(part("where"), `${where}: ${kind}`);
    const flip = h(
      "span",
      { class: "flip" },
      words ? h("mark", { class: "candidate" }, "…") : token("candidate", first.candidate_text),
      token("stock", first.stock_text),
    );
    part("passage").replaceChildren(
      ...marked(runningText(clip(first.context, BEFORE))),
      flip,
      ...marked(runningText(clip(first.after ?? "", AFTER, "first"))),
    );
    const side = (name, text, id) =>
      h(
        "div",
        { class: name },
        h("dt", {}, name),
        h("dd", {}, text, id >= 0 ? h("small", {}, `token ${f.number(id)}`) : null),
      );
    const quoted = (text) => h("code", {}, marked(tokenText(clip(text, TOKEN, "first"))));
    part("sides").replaceChildren(
      side("candidate", words || quoted(first.candidate_text), first.candidate_token),
      side("stock", quoted(first.stock_text), first.stock_token),
    );
    const passage = part("passage");
    passage.scrollTop = flip.offsetTop - passage.clientHeight / 2; // the place itself, however long the text before it
    setText(
      part("gap"),
      words
        ? ""
        : `Stock puts its own token ${e.logits(first.logit_gap)} logits above the candidate's; ` +
            `near-ties end at ${e.logits(forcing.tie_margin)}.`,
    );
  }

  function timingPart() {
    const { timing } = evidence;
    if (!show("timing", Boolean(timing))) return;
    part("timing-facts").replaceChildren(...facts(e.timingFacts(timing)));
    const lines = e.disturbances(timing.comparison.conditions);
    show("disturbances", lines.length > 0);
    part("disturbances").replaceChildren(...lines.map((line) => h("li", {}, line)));
  }

  function costsPart() {
    const sentence = e.costSentence(evidence);
    if (!show("costs", Boolean(sentence))) return;
    setText(part("cost-sentence"), sentence);
    const shares = evidence.costs
      .map((cost, i) => ({ ...cost, value: cost.seconds, tone: COST_TONES[i] }))
      .filter((cost) => cost.seconds > 0);
    part("cost-bar").replaceChildren(...(shares.length ? [bar(shares)] : []));
    part("cost-legend").replaceChildren(
      ...shares.map(({ name, seconds, tone }) =>
        h(
          "li",
          {},
          h("span", { class: `block ${tone}`, "aria-hidden": "true" }),
          `${name} `,
          h("b", {}, f.elapsed(seconds)),
        ),
      ),
    );
  }

  function againPart() {
    const { prompts, replay } = evidence;
    if (!show("again", prompts.length > 0 || Boolean(replay))) return;
    setText(part("prompt-count"), prompts.length ? `${f.plural(prompts.length, "hidden prompt")}, in order` : "");
    part("prompts").replaceChildren(...prompts.map((id) => h("code", {}, clip(id, 60, "first"))));
    show("replay", Boolean(replay));
    setText(document.getElementById("command-replay"), replay);
  }

  function draw() {
    show("loading", !evidence && part("failed").hidden);
    show("parts", Boolean(evidence));
    head();
    if (!evidence) return;
    verdictPart();
    forcingPart();
    divergencePart();
    timingPart();
    costsPart();
    againPart();
    part("json").href = `${apiUrl}/trials/${open}`;
    plots(evidence);
  }

  function fail(sentence) {
    part("failed").hidden = false;
    setText(part("failed").querySelector("p"), sentence);
    draw();
  }

  // ---- where it comes from

  async function ask() {
    request?.abort();
    const mine = new AbortController();
    request = mine;
    asked = e.stamp(candidate());
    const number = open;
    part("failed").hidden = true;
    try {
      const options = { headers: { Accept: "application/json" }, credentials: "same-origin", signal: mine.signal };
      const response = await fetch(`${apiUrl}/trials/${number}`, options);
      if (!response.ok) {
        if (request === mine) fail(await problemSentence(response, ""));
        return;
      }
      const found = await response.json();
      if (request !== mine) return;
      evidence = found;
      draw();
    } catch (error) {
      if (error.name !== "AbortError" && request === mine)
        fail("The server could not be reached; try again when the connection is back.");
    }
  }

  // ---- opening, closing, address

  function address(number) {
    return number === null ? pageUrl : `${pageUrl}/trials/${number}`;
  }

  function reveal(number) {
    if (open !== number) evidence = null;
    open = number;
    if (!dialog.open) dialog.showModal();
    part("body").scrollTop = 0;
    draw();
    part("title").focus({ preventScroll: true });
    ask();
  }

  function hide() {
    if (open === null) return;
    const link = document.querySelector(`#trial-${open} a[data-trial]`);
    open = null;
    evidence = null;
    request?.abort();
    request = null;
    if (dialog.open) dialog.close();
    link?.focus(); // the row may have been drawn again since: the element that had the focus is then gone
  }

  function go(number) {
    if (open === null) {
      history.pushState(null, "", address(number));
      pushed = true;
    } else {
      history.replaceState(null, "", address(number));
    }
    reveal(number);
  }

  function leave() {
    if (open === null) return;
    if (pushed) history.back(); // and `popstate` hides it
    else {
      history.replaceState(null, "", address(null));
      hide();
    }
    pushed = false;
  }

  function step(direction) {
    const others = candidates().map((row) => row.trial);
    const next = others.filter((number) => (number - open) * direction > 0).sort((a, b) => (a - b) * direction)[0];
    if (next !== undefined) go(next);
  }

  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[data-trial]");
    if (!link || event.button !== 0 || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
    event.preventDefault();
    go(Number(link.dataset.trial));
  });
  addEventListener("popstate", () => {
    const number = e.trialOf(location.pathname, pageUrl);
    if (number === null) hide();
    else reveal(number);
  });
  dialog.addEventListener("cancel", (event) => {
    event.preventDefault();
    leave();
  });
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) leave(); // beside the panel
  });
  dialog.addEventListener("close", leave); // the browser may close it without asking
  part("close").addEventListener("click", leave);
  part("older").addEventListener("click", () => step(-1));
  part("newer").addEventListener("click", () => step(1));
  part("failed").querySelector("button").addEventListener("click", ask);

  return function render(newView) {
    const start = view === null;
    view = newView;
    if (start && first !== null) reveal(first);
    if (open === null) return;
    if (asked !== e.stamp(candidate())) ask();
    head();
  };
}
