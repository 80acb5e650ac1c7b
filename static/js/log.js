// The event log: one line in words for each event, newest first.

import { h } from "./dom.js";
import * as f from "./format.js";

/** A part of a line that stands out; `trial` makes it a link to that candidate's row. */
const strong = (text, trial = null) => ({ strong: text, trial });
const trialOf = (data) => strong(`trial ${data.trial}`, data.trial);

function changesInWords(changes) {
  const parts = Object.entries(changes ?? {}).map(([lever, value]) => `${lever} = ${f.leverValue(value)}`);
  return parts.join(", ") || "no change";
}

function judged({ trial, judgement }) {
  const { verdict, reason } = judgement;
  const parts = [trialOf({ trial }), " ", strong(f.verdict(verdict).word.toLowerCase())];
  return reason ? [...parts, `: ${reason}`] : parts;
}

function profiled({ round, ms_per_token: ms, stages }, labels) {
  const parts = [`profile of round ${round}: `, strong(f.milliseconds(ms)), " per token"];
  const largest = (stages ?? []).reduce((best, row) => (!best || row.gap_ms > best.gap_ms ? row : best), null);
  if (largest) {
    parts.push(", largest gap ", strong(labels[largest.stage] ?? largest.stage), `, ${f.milliseconds(largest.gap_ms)}`);
  }
  return parts;
}

function incumbent(data) {
  const first = data.trial === 0;
  const parts = data.final
    ? ["final measurement of ", trialOf(data)]
    : [first ? "starting plan of " : "new best plan from ", trialOf(data)];
  if (!data.final && !first) parts.push(`, ${f.change(data.over_incumbent)} over the last`);
  const over = data.over_autoregressive;
  if (over) parts.push(": ", strong(f.ratio(over.ratio)), ` autoregressive (${f.interval(over.low, over.high)})`);
  return parts;
}

const LINES = {
  search_started: (d) => [
    "search started, seed ",
    strong(String(d.seed)),
    `, ${f.plural(d.budget.trials, "trial")} at most`,
  ],
  hardware_probed: (d) => {
    const { name, device, read_gb_s: read, matmul_gflop_s: rate } = d.profile ?? {};
    const parts = ["device measured: ", strong(name || device || "device")];
    if (f.isNumber(read)) parts.push(`, reads ${f.significant(read)}\u00a0GB/s`);
    if (f.isNumber(rate)) parts.push(`, ${f.significant(rate)}\u00a0GFLOP/s`);
    return parts;
  },
  stock_measured: (d) => ["stock ", strong(d.name), `: ${f.tokensPerSecond(d.tok_s)} (${d.implementation})`],
  profiled,
  round_started: (d) => [strong(`round ${d.round}`), " started"],
  candidate_proposed: (d) => [trialOf(d), ` proposed (${d.kind}): ${changesInWords(d.changes)}`],
  proposals_made: (d) => [strong(`round ${d.round}`), `: ${f.plural(d.count, "candidate")} to try`],
  trial_started: (d) => [trialOf(d), ` started on ${d.worker}`, d.attempt > 1 ? `, attempt ${d.attempt}` : ""],
  trial_progress: (d) => [trialOf(d), `: ${d.phase}`],
  trial_judged: judged,
  incumbent_changed: incumbent,
  round_ended: (d) => [
    strong(`round ${d.round}`),
    d.improved ? " ended with a new best plan" : " ended without a new best plan",
  ],
  status_changed: (d) => [strong(f.status(d.status).word.toLowerCase()), d.by ? ` by ${d.by}` : ""],
  action_failed: (d) => [strong("will try again"), `: ${d.key} failed: ${d.reason}`],
  note: (d) => [d.text],
  bundle_written: (d) => ["bundle written: ", strong(d.file), `, ${f.bytes(d.bytes)}`],
  search_finished: (d) => [strong("finished: "), d.sentence],
};

const TONES = { action_failed: "warn", incumbent_changed: "ok", bundle_written: "ok" };

/** The line of an event as parts: plain text, or {strong, trial}. Pure. `labels` are stage labels by name. */
export function describe(event, labels = {}) {
  const write = LINES[event.type];
  if (!write) return [event.type.replaceAll("_", " ")];
  return write(event.data ?? {}, labels).filter((part) => part !== "");
}

/** The colour of a line; the words say the same. */
export function tone(event) {
  if (event.type === "trial_judged") return f.verdict(event.data.judgement.verdict).tone;
  if (event.type === "search_finished") return event.data.reason === "failed" ? "bad" : "ok";
  return TONES[event.type] ?? "";
}

/** True where `next` only moves the same trial's progress on, so that its line replaces the one before. */
export function replaces(previous, next) {
  return (
    previous?.type === "trial_progress" && next.type === "trial_progress" && previous.data.trial === next.data.trial
  );
}

/** Draws the log into `list`; at most `limit` lines stay in the page. */
export function createLog(list, empty, { limit = 400 } = {}) {
  let newest = null;

  function line(event, labels) {
    const body = h("span", { class: "what" });
    for (const part of describe(event, labels)) {
      if (typeof part === "string") body.append(part);
      else if (part.trial === null) body.append(h("b", {}, part.strong));
      else body.append(h("a", { href: `#trial-${part.trial}` }, part.strong));
    }
    const when = h("time", { datetime: new Date(event.time * 1000).toISOString() }, f.clock(event.time));
    return h("li", { "data-seq": event.seq, class: tone(event) || null }, when, body);
  }

  return function append(events, labels) {
    for (const event of events) {
      if (replaces(newest, event)) list.firstElementChild?.remove();
      list.prepend(line(event, labels));
      newest = event;
    }
    while (list.childElementCount > limit) list.lastElementChild.remove();
    empty.hidden = list.childElementCount > 0;
  };
}
