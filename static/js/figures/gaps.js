// Where the time goes: each stage's reachable floor, this plan's own floor beyond it, and the rest.

import { axis, base, NARROW, waiting } from "./common.js";
import * as f from "../format.js";

/** Gap rows in the order of the engine's stages. */
export function stageRows(view) {
  const rows = new Map((view.gaps ?? []).map((gap) => [gap.stage, gap]));
  const ordered = (view.stages ?? []).map((stage) => rows.get(stage.name)).filter(Boolean);
  const known = new Set(ordered.map((row) => row.stage));
  return [...ordered, ...[...rows.values()].filter((row) => !known.has(row.stage))];
}

/**
 * The three parts of a stage's bar. Draft quality looks at the whole step from another side, so only what a
 * better draft shape would save is drawn, on the same scale.
 */
export function barParts(row) {
  if (row.bound === "algorithm") return { reach: 0, own: 0, gap: row.gap_ms };
  const floor = Math.max(row.own_floor_ms, row.reachable_floor_ms);
  return {
    reach: row.reachable_floor_ms,
    own: floor - row.reachable_floor_ms,
    gap: Math.max(0, row.measured_ms - floor),
  };
}

function gapFigure(view, t, width) {
  const rows = stageRows(view);
  const narrow = width < NARROW;
  const names = rows.map((row) => row.label ?? row.stage);
  const bar = (values, name, color, pattern) => ({
    type: "bar",
    orientation: "h",
    y: names,
    x: values,
    name,
    marker: { color, pattern },
    hovertemplate: `%{y}<br>${name} %{x:.3g} ms<extra></extra>`,
  });
  const parts = rows.map(barParts);
  const reach = parts.map((part) => part.reach);
  const own = parts.map((part) => part.own);
  const gap = parts.map((part) => part.gap);
  const ends = parts.map((part) => part.reach + part.own + part.gap);
  const most = Math.max(...ends, 1e-9);
  const annotations = rows.map((row, i) => ({
    xref: "x",
    x: ends[i],
    y: i,
    xanchor: "left",
    showarrow: false,
    xshift: 4,
    text: row.bound === "algorithm" ? `save ${f.significant(row.gap_ms)}` : f.significant(row.measured_ms),
    font: { size: 11.5, color: t.text },
  }));
  if (narrow) {
    for (const [i, name] of names.entries()) {
      annotations.push({
        xref: "paper",
        x: 0,
        y: i,
        xanchor: "left",
        yshift: 15,
        showarrow: false,
        text: name,
        font: { size: 11.5, color: t.muted },
      });
    }
  }
  return {
    data: [
      bar(reach, "reachable floor", t.series1),
      bar(own, "this plan's floor beyond it", t.series4),
      bar(gap, "above this plan's floor", t.series2, {
        shape: "/",
        size: 6,
        solidity: 0.25,
        fgcolor: t.surface,
        fillmode: "overlay",
      }),
    ],
    layout: base(t, {
      barmode: "stack",
      bargap: narrow ? 0.62 : 0.38,
      annotations,
      margin: narrow ? { l: 6, r: 8, t: 12, b: 40 } : { l: 178, r: 12, t: 6, b: 40 },
      xaxis: axis(t, "ms per emitted token", { range: [0, most * 1.16], rangemode: "tozero", nticks: narrow ? 5 : 8 }),
      yaxis: axis(t, "", { autorange: "reversed", showgrid: false, showticklabels: !narrow, type: "category" }),
    }),
  };
}

export const gaps = {
  id: "gaps",
  title: "Where the time goes",
  empty: (view) =>
    view.gaps?.length
      ? null
      : waiting(
          view,
          "The stages appear when the first plan has been profiled.",
          "The search ended before a plan was profiled.",
        ),
  summary: (view) => {
    const now = view.gap_history?.at(-1);
    return now
      ? `${f.milliseconds(now.ms_per_token)} per token; the reachable floor is ${f.milliseconds(now.reachable_ms)}.`
      : "Time of each stage against its floors.";
  },
  legend: () => [
    { label: "reachable floor", shape: "box", tone: "series1" },
    { label: "this plan's floor beyond it", shape: "box", tone: "series4" },
    { label: "above this plan's floor", shape: "hatch", tone: "series2" },
  ],
  height: (view, width) => Math.max(250, 52 + stageRows(view).length * (width < NARROW ? 42 : 28)),
  table: (view) => ({
    header: [
      "stage",
      "measured ms/token",
      "own floor ms/token",
      "reachable floor ms/token",
      "gap ms/token",
      "bound by",
    ],
    rows: stageRows(view).map((r) => [
      r.label ?? r.stage,
      r.measured_ms,
      r.own_floor_ms,
      r.reachable_floor_ms,
      r.gap_ms,
      r.bound,
    ]),
    show: [String, f.significant, f.significant, f.significant, f.significant, String],
  }),
  figure: gapFigure,
};
