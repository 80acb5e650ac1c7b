// Accept length as a histogram, and acceptance by draft position: the best plan beside the first.

import { axis, base, waiting } from "./common.js";
import * as f from "../format.js";

/** Counts by emitted tokens as shares of all steps, index 0 left out. */
export function shares(histogram) {
  const counts = (histogram ?? []).slice(1);
  const total = counts.reduce((sum, count) => sum + count, 0);
  return total > 0 ? counts.map((count) => count / total) : [];
}

/** The first profile only where it differs from the newest one. */
function firstProfile(view) {
  const first = view.first_profile_accept;
  return first && JSON.stringify(first) !== JSON.stringify(view.accept) ? first : null;
}

function acceptFigure(view, t) {
  const bars = (accept, name, color) => {
    const y = shares(accept.histogram).map((share) => share * 100);
    return {
      type: "bar",
      x: y.map((_, i) => i + 1),
      y,
      name,
      marker: { color },
      hovertemplate: `%{x} tokens: %{y:.1f} % of steps<extra>${name}</extra>`,
    };
  };
  const first = firstProfile(view);
  const data = [bars(view.accept, "best plan", t.series1)];
  if (first) data.unshift(bars(first, "first plan", t.series4));
  return {
    data,
    layout: base(t, {
      barmode: "group",
      bargap: 0.25,
      xaxis: axis(t, "tokens emitted by a step, bonus token included", { dtick: 1, showgrid: false }),
      yaxis: axis(t, "", { ticksuffix: " %", rangemode: "tozero", nticks: 5 }),
    }),
  };
}

const beforeAfter = (shape) => (view) => [
  ...(firstProfile(view) ? [{ label: "first plan", shape, tone: "series4" }] : []),
  { label: "best plan", shape, tone: "series1" },
];

export const accept = {
  id: "accept",
  title: "Accept length",
  empty: (view) =>
    shares(view.accept?.histogram).length
      ? null
      : waiting(view, "The histogram appears with the first profile.", "No decode step was profiled."),
  summary: (view) => {
    const first = firstProfile(view);
    const now = `Mean ${f.number(view.accept?.accept_length, 2)} tokens per step`;
    return first ? `${now}; the first plan had ${f.number(first.accept_length, 2)}.` : `${now}.`;
  },
  legend: beforeAfter("box"),
  table: (view) => {
    const now = shares(view.accept?.histogram);
    const then = shares(firstProfile(view)?.histogram);
    const count = Math.max(now.length, then.length);
    return {
      header: ["tokens emitted", "best plan, share of steps", "first plan, share of steps"],
      rows: Array.from({ length: count }, (_, i) => [i + 1, now[i] ?? 0, then.length ? (then[i] ?? 0) : null]),
      show: [String, (v) => f.percent(v, 1), (v) => f.percent(v, 1)],
    };
  },
  figure: acceptFigure,
};

function positionFigure(view, t) {
  const line = (accept, name, color, symbol) => ({
    x: accept.by_position.map((_, i) => i + 1),
    y: accept.by_position.map((share) => share * 100),
    name,
    mode: "lines+markers",
    line: { color, width: 2 },
    marker: { symbol, size: 7, color },
    hovertemplate: `position %{x}: %{y:.0f} %<extra>${name}</extra>`,
  });
  const first = firstProfile(view);
  const data = [line(view.accept, "best plan", t.series1, "circle")];
  if (first?.by_position?.length) data.unshift(line(first, "first plan", t.series4, "square-open"));
  return {
    data,
    layout: base(t, {
      xaxis: axis(t, "draft position", {
        dtick: 1,
        showgrid: false,
        rangemode: "tozero",
        zeroline: false,
        range: [0.6, Math.max(...data.map((d) => d.x.length)) + 0.4],
      }),
      yaxis: axis(t, "", { ticksuffix: " %", range: [0, 103], nticks: 6 }),
    }),
  };
}

export const position = {
  id: "position",
  title: "Acceptance by position",
  empty: (view) =>
    view.accept?.by_position?.length
      ? null
      : waiting(view, "The curve appears with the first profile that drafts.", "No drafts were profiled."),
  summary: (view) => `A first draft token is accepted in ${f.percent(view.accept?.by_position?.[0])} of steps.`,
  legend: (view) =>
    beforeAfter("line")(view).map((entry) => ({ ...entry, marker: entry.label === "first plan" ? "square" : "dot" })),
  table: (view) => {
    const now = view.accept?.by_position ?? [];
    const then = firstProfile(view)?.by_position ?? [];
    return {
      header: ["draft position", "best plan, share accepted", "first plan, share accepted"],
      rows: Array.from({ length: Math.max(now.length, then.length) }, (_, i) => [
        i + 1,
        now[i] ?? null,
        then[i] ?? null,
      ]),
      show: [String, (v) => f.percent(v, 1), (v) => f.percent(v, 1)],
    };
  },
  figure: positionFigure,
};
