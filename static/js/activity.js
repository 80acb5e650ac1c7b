// What each worker does now, and what it did: one lane each, built from the events' times.

import { h, reconcile, setText } from "./dom.js";
import * as f from "./format.js";
import { glyph } from "./glyphs.js";

const WINDOW = 20 * 60; // seconds of history in a lane

/**
 * Trials as spans of time: {trial, worker, start, end (null while it runs), verdict}. A trial that was started
 * again after a worker died keeps its newest start. Pure.
 */
export function spans(events) {
  const found = new Map();
  for (const { type, time, data } of events) {
    if (type === "trial_started") {
      found.set(data.trial, { trial: data.trial, worker: data.worker, start: time, end: null, verdict: null });
    }
    const open = type === "trial_judged" && found.get(data.trial);
    if (open) Object.assign(open, { end: time, verdict: data.judgement.verdict });
  }
  return [...found.values()];
}

/** One lane for each worker that ran a trial, with its spans and the candidate that it judges now. Pure. */
export function lanes(view, events) {
  const candidates = new Map((view.candidates ?? []).map((c) => [c.trial, c]));
  const byWorker = new Map();
  for (const span of spans(events)) {
    const lane = byWorker.get(span.worker) ?? { worker: span.worker, spans: [], now: null };
    byWorker.set(span.worker, lane);
    lane.spans.push(span);
    const candidate = candidates.get(span.trial);
    if (candidate?.status === "running") lane.now = candidate;
  }
  return [...byWorker.values()].sort((a, b) => a.worker.localeCompare(b.worker));
}

/** The seconds that the lanes cover: at most the newest 20 minutes. Pure. */
export function period(events, now) {
  const first = events[0]?.time ?? now;
  const end = Math.max(now, events.at(-1)?.time ?? now);
  return { start: Math.max(first, end - WINDOW), end };
}

/** The element of one span; `place` says where it lies. */
function segment(span) {
  const look = span.verdict ? f.verdict(span.verdict) : { tone: "run", word: "running" };
  const took = span.end === null ? "" : `, ${f.duration(span.end - span.start)}`;
  const text = `trial ${span.trial}, ${look.word.toLowerCase()}${took}`;
  const element = h(
    "a",
    { class: `seg ${look.tone}`, href: `#trial-${span.trial}`, title: text, "aria-label": text },
    span.verdict ? glyph(span.verdict) : null,
    h("span", {}, String(span.trial)),
  );
  element.dataset.start = span.start;
  if (span.end !== null) element.dataset.end = span.end;
  return element;
}

/** Moves a segment with the clock, so that the element (and the focus on it) stays. */
function place(element, { start, end }) {
  const length = Math.max(1, end - start);
  const from = Math.max(Number(element.dataset.start), start);
  const to = Number(element.dataset.end ?? end);
  element.hidden = to <= start;
  element.style.setProperty("left", `${((from - start) / length) * 100}%`);
  element.style.setProperty("width", `${Math.max(0.4, ((to - from) / length) * 100)}%`);
}

/** Wires the card; returns `render(view, events)`. */
export function createActivity(section) {
  const find = (name) => section.querySelector(`[data-part="${name}"]`);
  const [list, now, note] = ["lanes", "now", "note"].map(find);

  return function render(view, events) {
    const ended = view.status === "finished" || view.status === "failed";
    const at = ended ? (events.at(-1)?.time ?? 0) : Date.now() / 1000;
    const covered = period(events, at);
    const rows = lanes(view, events);
    setText(now, rows.length ? "" : ended ? "No trial was run." : view.sentence || "Starting.");
    now.hidden = rows.length > 0;
    setText(note, rows.length ? `${ended ? "the last" : "last"} ${f.duration(covered.end - covered.start)}` : "");
    reconcile(
      list,
      rows,
      (lane) => lane.worker,
      (lane) => JSON.stringify([lane, ended]),
      (lane) =>
        h(
          "li",
          { class: "lane" },
          h("b", { title: lane.worker }, lane.worker),
          h("div", { class: "track" }, lane.spans.map(segment)),
          h(
            "small",
            {},
            lane.now ? `trial ${lane.now.trial}: ${lane.now.phase || "starting"}` : ended ? "done" : "no trial now",
          ),
        ),
    );
    for (const element of list.querySelectorAll(".seg")) place(element, covered);
  };
}
