// Speedup over rounds: every judged trial, the best plan so far, the stock baselines and the ceiling.

import { axis, base, NARROW, waiting } from "./common.js";
import * as f from "../format.js";

/** The released speculative baseline as a speedup over stock autoregressive decoding, or null. */
export function stockSpeculative(view) {
  const rate = (name) => view.stocks?.find((stock) => stock.name === name)?.tok_s;
  const plain = rate("autoregressive");
  const speculative = rate("speculative");
  return plain > 0 && speculative > 0 ? speculative / plain : null;
}

/** The incumbent's line runs on to the newest trial, so that "nothing better since" can be seen. */
function incumbentLine(view) {
  const steps = view.incumbents ?? [];
  if (!steps.length) return { x: [], y: [] };
  const x = steps.map((step) => step.trial);
  const y = steps.map((step) => step.ratio);
  const newest = Math.max(...x, ...(view.points ?? []).map((point) => point.trial));
  if (newest > x.at(-1)) {
    x.push(newest);
    y.push(y.at(-1));
  }
  return { x, y };
}

function roundBands(view, t) {
  const ends = new Map();
  for (const { trial, round } of view.candidates ?? []) {
    const [low, high] = ends.get(round) ?? [trial, trial];
    ends.set(round, [Math.min(low, trial), Math.max(high, trial)]);
  }
  const shapes = [];
  const annotations = [];
  for (const [round, [low, high]] of ends) {
    const band = { xref: "x", yref: "paper", y0: 0, y1: 1, x0: low - 0.5, x1: high + 0.5 };
    if (round % 2 === 1) {
      shapes.push({ ...band, type: "rect", layer: "below", line: { width: 0 }, fillcolor: t.sunken });
    }
    annotations.push({
      x: (low + high) / 2,
      xref: "x",
      y: 1,
      yref: "paper",
      yanchor: "bottom",
      showarrow: false,
      text: high - low >= 2 ? `round ${round}` : `r${round}`,
      font: { size: 10.5, color: t.faint },
    });
  }
  return { shapes, annotations };
}

/** Judged trials without a time (crashed, timed out, lossy before timing): they stand on a line of their own. */
export function untimedTrials(view) {
  const timed = new Set((view.points ?? []).map((point) => point.trial));
  return (view.candidates ?? []).filter((c) => c.status === "judged" && !timed.has(c.trial) && !f.isNumber(c.ratio));
}

function speedupFigure(view, t, width) {
  const timed = view.points ?? [];
  const untimed = untimedTrials(view);
  const line = incumbentLine(view);
  const ceiling = view.headline?.ceiling_ratio;
  const speculative = stockSpeculative(view);
  const top = Math.max(1, ...timed.map((point) => point.ratio), ...line.y, speculative ?? 0) * 1.16;
  const ceilingFits = f.isNumber(ceiling) && ceiling <= top * 1.6;
  const room = f.isNumber(ceiling) && !ceilingFits ? 1.14 : 1; // for the words that stand in for its line
  const { shapes, annotations } = roundBands(view, t);
  const data = [
    {
      ...line,
      name: "best plan so far",
      mode: "lines",
      line: { shape: "hv", width: 2.5, color: t.series1 },
      hovertemplate: "best plan %{y:.2f}×<extra></extra>",
    },
  ];
  const which = "trial %{x} (%{customdata[1]}), round %{customdata[0]}<br>";
  for (const [name, look] of Object.entries(f.VERDICTS)) {
    const mark = (rows, y, extra = {}) => ({
      x: rows.map((point) => point.trial),
      y,
      name: look.word.toLowerCase(),
      mode: "markers",
      marker: { color: t[look.tone], symbol: look.symbol, size: 9, line: { width: 1.75, color: t[look.tone] } },
      customdata: rows.map((point) => [point.round, point.kind]),
      ...extra,
    });
    const scored = timed.filter((point) => point.verdict === name);
    if (scored.length) {
      data.push(
        mark(
          scored,
          scored.map((point) => point.ratio),
          {
            hovertemplate: `${which}${look.word.toLowerCase()}, %{y:.2f}×<extra></extra>`,
          },
        ),
      );
    }
    const rest = untimed.filter((point) => point.verdict === name);
    if (rest.length) {
      data.push(
        mark(
          rest,
          rest.map(() => 0),
          {
            yaxis: "y2",
            showlegend: scored.length === 0,
            hovertemplate: `${which}${look.word.toLowerCase()}, not timed<extra></extra>`,
          },
        ),
      );
    }
  }
  const rule = (y, color, dash) =>
    shapes.push({
      type: "line",
      xref: "paper",
      x0: 0,
      x1: 1,
      yref: "y",
      y0: y,
      y1: y,
      line: { dash, color, width: 1.5 },
    });
  const label = (y, text, color, extra = {}) =>
    annotations.push({
      xref: "paper",
      x: 0.995,
      xanchor: "right",
      yref: "y",
      y,
      text,
      showarrow: false,
      yshift: 8,
      font: { color, size: 11.5 },
      ...extra,
    });
  rule(1, t.series4, "dot");
  label(1, "stock autoregressive 1×", t.muted, { yshift: (speculative ?? 0) > 1 ? -9 : 8 });
  if (speculative) {
    rule(speculative, t.series3, "dot");
    label(speculative, `stock speculative ${f.ratio(speculative)}`, t.series3, { yshift: speculative > 1 ? 8 : -9 });
  }
  if (ceilingFits) {
    rule(ceiling, t.series2, "dash");
    label(ceiling, `ceiling ${f.ratio(ceiling)}`, t.series2);
  } else if (f.isNumber(ceiling)) {
    label(1, `↑ ceiling ${f.ratio(ceiling)}, off this scale`, t.series2, {
      yref: "paper",
      x: 0.01,
      xanchor: "left",
      yshift: -9,
    });
  }
  if (line.y.length) {
    label(line.y.at(-1), f.ratio(line.y.at(-1)), t.series1, {
      xref: "x",
      x: line.x.at(-1),
      xanchor: "right",
      yshift: 11,
      font: { color: t.series1, size: 13, weight: 700 },
    });
  }
  const last = Math.max(8, ...line.x, ...(view.candidates ?? []).map((c) => c.trial));
  const foot = untimed.length ? 0.13 : 0;
  return {
    data,
    layout: base(t, {
      margin: { l: width < NARROW ? 38 : 48, r: 14, t: 24, b: 42 },
      shapes,
      annotations,
      xaxis: axis(t, "trial", {
        range: [-0.6, last + 0.6],
        showgrid: false,
        zeroline: false,
        ...(last <= (width < NARROW ? 8 : 16) ? { dtick: 1 } : { nticks: width < NARROW ? 7 : 14 }),
        anchor: untimed.length ? "y2" : "y",
      }),
      yaxis: axis(t, "× stock autoregressive", {
        range: [0, Math.max(top * room, ceilingFits ? ceiling * 1.1 : 0)],
        domain: [foot, 1],
      }),
      yaxis2: axis(t, "", {
        domain: [0, Math.max(0.01, foot - 0.04)],
        range: [-1, 1],
        tickvals: [0],
        ticktext: [width < NARROW ? "n/a" : "no time"],
        showgrid: false,
        zeroline: false,
        visible: untimed.length > 0,
        tickfont: { size: 10.5 },
      }),
    }),
  };
}

export const speedup = {
  id: "speedup",
  title: "Speedup over rounds",
  height: (_, width) => (width < NARROW ? 300 : 400),
  empty: (view) =>
    view.points?.length || view.incumbents?.length
      ? null
      : waiting(
          view,
          "The first point appears when the stock baselines are measured and a candidate is judged.",
          "The search ended before a candidate was judged.",
        ),
  summary: (view) => {
    const best = view.incumbents?.at(-1);
    const judged = (view.points?.length ?? 0) + untimedTrials(view).length;
    const words = `${f.plural(judged, "judged trial")}.`;
    return best
      ? `${words} Best plan so far ${f.ratio(best.ratio)} stock autoregressive decoding, from trial ${best.trial}.`
      : words;
  },
  legend: (view) => {
    const seen = new Set([...(view.points ?? []), ...untimedTrials(view)].map((trial) => trial.verdict));
    const verdicts = Object.entries(f.VERDICTS).filter(([name]) => seen.has(name));
    return [
      { label: "best plan so far", shape: "line", tone: "series1" },
      ...verdicts.map(([name, look]) => ({ label: look.word.toLowerCase(), verdict: name, tone: look.tone })),
    ];
  },
  table: (view) => ({
    header: ["trial", "round", "kind", "verdict", "speedup over autoregressive"],
    rows: [...(view.points ?? []), ...untimedTrials(view)]
      .sort((a, b) => a.trial - b.trial)
      .map((p) => [p.trial, p.round, p.kind, p.verdict, p.ratio]),
    show: [String, String, String, String, f.ratio],
  }),
  figure: speedupFigure,
};
