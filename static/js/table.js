// The candidates: one row each, filter by text and verdict, CSV.

import { h, reconcile, saveFile } from "./dom.js";
import * as f from "./format.js";
import { dotPill, verdictPill } from "./glyphs.js";

const KEYS = {
  trial: (c) => String(c.trial),
  round: (c) => String(c.round),
  stage: (c) => c.stage ?? "",
  agent: (c) => c.agent ?? "",
  arm: (c) => c.arm ?? "",
  kind: (c) => c.kind ?? "",
  lever: (c) => (c.changes ?? []).map((change) => change.lever).join(" "),
};
const EXACT = new Set(["trial", "round"]);

/** All words of a candidate, for a search by plain text. Pure. */
function haystack(c) {
  const changes = (c.changes ?? []).flatMap(({ lever, from, to }) => [lever, f.leverValue(from), f.leverValue(to)]);
  return [c.trial, c.kind, c.agent, c.arm, c.stage, c.rationale, c.verdict, c.reason, c.phase, ...changes]
    .join(" ")
    .toLowerCase();
}

/**
 * Whether a candidate passes the filter. `query` is words that must all occur; `key:value` looks in one field
 * (trial, round, stage, agent, arm, kind, lever). `verdict` is "", a verdict, or "open" (no verdict yet). Pure.
 */
export function matches(candidate, query, verdict) {
  if (verdict === "open" ? candidate.status === "judged" : verdict && candidate.verdict !== verdict) return false;
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  const text = words.length ? haystack(candidate) : "";
  return words.every((word) => {
    const [key, value] = word.split(/:(.*)/s);
    if (value === undefined || !(key in KEYS)) return text.includes(word);
    const field = KEYS[key](candidate).toLowerCase();
    return EXACT.has(key) ? field === value : field.includes(value);
  });
}

const CSV_HEADER = [
  "trial",
  "round",
  "kind",
  "agent",
  "arm",
  "stage",
  "changes",
  "predicted_ratio",
  "status",
  "verdict",
  "reason",
  "ratio",
  "ratio_low",
  "ratio_high",
  "accept_length",
  "tokens_exact",
  "tokens_near_tie",
  "tokens_error",
  "seconds",
];

function changeText({ lever, from, to }) {
  return `${lever}: ${f.leverValue(from)} -> ${f.leverValue(to)}`;
}

/** Candidates as CSV. Pure. */
export function candidatesCsv(candidates) {
  return f.csv(
    CSV_HEADER,
    candidates.map((c) => [
      c.trial,
      c.round,
      c.kind,
      c.agent,
      c.arm,
      c.stage,
      (c.changes ?? []).map(changeText).join("; "),
      c.predicted,
      c.status,
      c.verdict,
      c.reason,
      c.ratio,
      c.low,
      c.high,
      c.accept_length,
      c.forcing?.exact,
      c.forcing?.near_tie,
      c.forcing?.error,
      c.seconds,
    ]),
  );
}

/** What a plan changes, as elements. */
export function chips(changes) {
  if (!changes?.length) return h("span", { class: "quiet" }, "the starting plan");
  return changes.map(({ lever, from, to }) =>
    h(
      "span",
      { class: "chip" },
      `${lever} `,
      h("s", {}, h("span", { class: "sr" }, "from "), f.leverValue(from)),
      h("span", { class: "sr" }, " to"),
      " ",
      h("b", {}, f.leverValue(to)),
    ),
  );
}

function measured(c) {
  if (!f.isNumber(c.ratio)) return f.NONE;
  const span = f.isNumber(c.low) ? h("small", {}, `${f.change(c.low)} to ${f.change(c.high)}`) : null;
  return [h("span", {}, f.change(c.ratio)), span];
}

function forcing(counts) {
  if (!counts) return f.NONE;
  const error = h("span", { class: counts.error ? "error" : null }, f.number(counts.error));
  const limit = f.isNumber(counts.near_tie_limit)
    ? h("small", {}, `near-tie limit ${f.number(counts.near_tie_limit)}`)
    : null;
  return [h("span", { class: "counts" }, `${f.number(counts.exact)} · ${f.number(counts.near_tie)} · `, error), limit];
}

function state(c, ended) {
  if (c.status === "judged") return verdictPill(c.verdict);
  if (c.status === "running" && !ended) return dotPill("run", "Running");
  return dotPill("idle", ended ? "Not run" : "Waiting");
}

/** Why, in words: the first line of the judge's reason (its panel has the rest), or where the trial stands. Pure. */
export function reasonOf(c, ended) {
  if (c.status === "judged") return c.reason?.split("\n")[0] || f.NONE;
  if (ended) return "The search ended before it was judged.";
  return c.phase || (c.status === "running" ? "starting" : "waiting for a worker");
}

function row(c, old, ended, pageUrl) {
  const panel = { href: `${pageUrl}/trials/${c.trial}`, "data-trial": c.trial };

  const facts = [
    c.arm && `proposed by ${c.arm}`,
    c.agent && `agent ${c.agent}`,
    f.isNumber(c.accept_length) && `accept length ${f.number(c.accept_length, 2)}`,
    f.isNumber(c.seconds) && c.seconds > 0 && `judged in ${f.duration(c.seconds)}`,
  ].filter(Boolean);
  const why = h(
    "details",
    { open: old?.querySelector("details")?.open ?? false },
    h("summary", {}, "Why it was tried"),
    c.rationale ? h("p", {}, c.rationale) : null,
    h("p", {}, facts.join(" · ")),
  );
  const cell = (label, { class: name = "" }, ...children) =>
    h(
      "td",
      { "data-l": label, class: children[0] === f.NONE ? `${name} nothing` : name || null },
      h("div", { class: "cell" }, ...children),
    );
  return h(
    "tr",
    { id: `trial-${c.trial}`, class: c.status === "running" && !ended ? "running" : null },
    h(
      "th",
      { scope: "row", "data-l": "trial" },
      h(
        "div",
        { class: "cell" },
        h("a", { ...panel, "aria-label": `Trial ${c.trial}, evidence` }, String(c.trial)),
        h("small", {}, `round ${c.round}`),
        c.kind && c.kind !== "candidate" ? h("small", { class: "kind" }, c.kind) : null,
      ),
    ),
    cell("change", { class: "changes" }, chips(c.changes)),
    cell("stage", {}, c.stage || f.NONE),
    cell("predicted", { class: "num" }, f.change(c.predicted)),
    cell("measured", { class: "num" }, measured(c)),
    cell("exact · near-tie · error", { class: "num" }, forcing(c.forcing)),
    cell("verdict", { class: "verdict" }, state(c, ended)),
    cell(
      "reason",
      { class: "why" },
      h("p", {}, reasonOf(c, ended)),
      h("div", { class: "more" }, h("a", { ...panel, "aria-label": `Evidence of trial ${c.trial}` }, "Evidence"), why),
    ),
  );
}

/** Wires the table, its filter and its download; returns `render(view)`. Panels of trials are at `pageUrl`/trials. */
export function createTable(section, searchName, pageUrl) {
  const find = (name) => section.querySelector(`[data-part="${name}"]`);
  const [body, empty, none, search, select, count] = ["body", "empty", "none", "search", "verdict", "count"].map(find);
  const table = section.querySelector("table");
  let candidates = [];
  let ended = false;

  const shown = () => candidates.filter((c) => matches(c, search.value, select.value));

  function draw() {
    const rows = shown();
    reconcile(
      body,
      rows,
      (c) => String(c.trial),
      (c) => JSON.stringify([c, ended]),
      (c, old) => row(c, old, ended, pageUrl),
    );
    table.hidden = rows.length === 0;
    empty.hidden = candidates.length > 0;
    empty.classList.toggle("over", ended);
    none.hidden = candidates.length === 0 || rows.length > 0;
    empty.querySelector("p").textContent = ended
      ? "The search ended before a candidate was proposed."
      : "No candidate yet. The agents propose the first when the stock baselines and the first profile are in.";
    count.textContent =
      rows.length === candidates.length
        ? f.number(rows.length)
        : `${f.number(rows.length)} of ${f.number(candidates.length)}`;
    find("csv").disabled = rows.length === 0;
  }

  search.addEventListener("input", draw);
  select.addEventListener("change", draw);
  find("clear").addEventListener("click", () => {
    search.value = "";
    select.value = "";
    draw();
    search.focus();
  });
  find("csv").addEventListener("click", () => {
    saveFile(`${f.fileName(searchName, "candidates")}.csv`, candidatesCsv(shown()), "text/csv");
  });

  return function render(view) {
    candidates = [...(view.candidates ?? [])].sort((a, b) => b.trial - a.trial);
    ended = view.status === "finished" || view.status === "failed";
    draw();
  };
}
