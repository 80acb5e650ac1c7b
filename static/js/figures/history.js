// Time per token over rounds, measured against the reachable floor.

import { axis, base, NARROW, waiting } from "./common.js";
import * as f from "../format.js";

function historyFigure(view, t, width) {
  const rows = view.gap_history ?? [];
  const x = rows.map((row) => row.round);
  const reach = rows.map((row) => row.reachable_ms);
  const measured = rows.map((row) => row.ms_per_token);
  const top = Math.max(...measured, ...reach.filter(f.isNumber)) * 1.16;
  const label = (value, color, shift) =>
    f.isNumber(value)
      ? [
          {
            x: x.at(-1),
            y: value,
            text: `${f.significant(value)} ms`,
            showarrow: false,
            xanchor: "right",
            yshift: shift,
            font: { color, size: 12, weight: 700 },
          },
        ]
      : [];
  return {
    data: [
      {
        x,
        y: reach,
        name: "reachable floor",
        mode: "lines+markers",
        line: { color: t.series2, width: 2, dash: "dash" },
        marker: { symbol: "square-open", size: 7, color: t.series2 },
        hovertemplate: "round %{x}: floor %{y:.3g} ms<extra></extra>",
      },
      {
        x,
        y: measured,
        name: "measured",
        mode: "lines+markers",
        line: { color: t.series1, width: 2.5 },
        marker: { symbol: "circle", size: 8, color: t.series1 },
        hovertemplate: "round %{x}: measured %{y:.3g} ms<extra></extra>",
      },
    ],
    layout: base(t, {
      margin: { l: width < NARROW ? 40 : 48, r: 16, t: 14, b: 42 },
      annotations: [
        ...label(measured.at(-1), t.series1, 14),
        ...label(reach.at(-1), t.series2, reach.at(-1) < 0.15 * top ? 14 : -14),
      ],
      xaxis: axis(t, "round", {
        dtick: 1,
        showgrid: false,
        zeroline: false,
        range: [Math.min(...x) - 0.3, Math.max(...x, 1) + 0.3],
      }),
      yaxis: axis(t, "ms per token", { range: [0, top], nticks: 5 }),
    }),
  };
}

export const history = {
  id: "history",
  title: "Time per token by round",
  empty: (view) =>
    view.gap_history?.length
      ? null
      : waiting(view, "One point appears with each round's profile.", "No round was profiled."),
  summary: (view) => {
    const last = view.gap_history?.at(-1);
    return last
      ? `Now ${f.milliseconds(last.ms_per_token)} per token, reachable ${f.milliseconds(last.reachable_ms)}.`
      : "";
  },
  legend: () => [
    { label: "measured", shape: "line", tone: "series1", marker: "dot" },
    { label: "reachable floor", shape: "dash", tone: "series2", marker: "square" },
  ],
  table: (view) => ({
    header: ["round", "measured ms/token", "reachable ms/token"],
    rows: (view.gap_history ?? []).map((row) => [row.round, row.ms_per_token, row.reachable_ms]),
    show: [String, f.significant, f.significant],
  }),
  figure: historyFigure,
};
