// What each plot shows: figures for Plotly, the same figures as a table, a sentence, and why it is still empty.
// Pure functions of the view, the theme's colours and the width; plots.js draws them.

import * as f from "./format.js";

const NARROW = 520; // px of plot width under which labels move out of the margins

function base(t, extra = {}) {
  return {
    margin: { l: 48, r: 14, t: 14, b: 42 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: t.sans, size: 12, color: t.muted },
    hoverlabel: { font: { family: t.sans, size: 12.5, color: t.text }, bgcolor: t.surface, bordercolor: t.line },
    showlegend: false,
    dragmode: false,
    ...extra,
  };
}

function axis(t, title, extra = {}) {
  return {
    title: { text: title, font: { size: 12 }, standoff: 8 },
    gridcolor: t.line,
    zerolinecolor: t.line,
    linecolor: t.line,
    fixedrange: true,
    automargin: false,
    ...extra,
  };
}

function waiting(view, running, ended) {
  return view.status === "finished" || view.status === "failed" ? ended : running;
}

// ---- speedup over rounds

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
      x: (low + high) / 2, xref: "x", y: 1, yref: "paper", yanchor: "bottom", showarrow: false,
      text: high - low >= 2 ? `round ${round}` : `r${round}`, font: { size: 10.5, color: t.faint },
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
  const { shapes, annotations } = roundBands(view, t);
  const data = [
    {
      ...line, name: "best plan so far", mode: "lines", line: { shape: "hv", width: 2.5, color: t.series1 },
      hovertemplate: "best plan %{y:.2f}×<extra></extra>",
    },
  ];
  for (const [name, look] of Object.entries(f.VERDICTS)) {
    const mark = (rows, y, extra = {}) => ({
      x: rows.map((point) => point.trial), y, name: look.word.toLowerCase(), mode: "markers",
      marker: { color: t[look.tone], symbol: look.symbol, size: 9, line: { width: 1.75, color: t[look.tone] } },
      customdata: rows.map((point) => [point.round, point.kind]), ...extra,
    });
    const scored = timed.filter((point) => point.verdict === name);
    if (scored.length) {
      data.push(mark(scored, scored.map((point) => point.ratio), {
        hovertemplate: `trial %{x} (%{customdata[1]}), round %{customdata[0]}<br>${look.word.toLowerCase()}, %{y:.2f}×<extra></extra>`,
      }));
    }
    const rest = untimed.filter((point) => point.verdict === name);
    if (rest.length) {
      data.push(mark(rest, rest.map(() => 0), {
        yaxis: "y2", showlegend: scored.length === 0,
        hovertemplate: `trial %{x} (%{customdata[1]}), round %{customdata[0]}<br>${look.word.toLowerCase()}, not timed<extra></extra>`,
      }));
    }
  }
  const rule = (y, color, dash) =>
    shapes.push({ type: "line", xref: "paper", x0: 0, x1: 1, yref: "y", y0: y, y1: y, line: { dash, color, width: 1.5 } });
  const label = (y, text, color, extra = {}) =>
    annotations.push({ xref: "paper", x: 0.995, xanchor: "right", yref: "y", y, text, showarrow: false, yshift: 8, font: { color, size: 11.5 }, ...extra });
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
    label(1, `↑ ceiling ${f.ratio(ceiling)}, off this scale`, t.series2, { yref: "paper", x: 0.01, xanchor: "left", yshift: -9 });
  }
  if (line.y.length) {
    label(line.y.at(-1), f.ratio(line.y.at(-1)), t.series1, {
      xref: "x", x: line.x.at(-1), xanchor: "right", yshift: 11, font: { color: t.series1, size: 13, weight: 700 },
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
      xaxis: axis(t, "trial", { range: [-0.6, last + 0.6], showgrid: false, zeroline: false, ...(last <= (width < NARROW ? 8 : 16) ? { dtick: 1 } : { nticks: width < NARROW ? 7 : 14 }), anchor: untimed.length ? "y2" : "y" }),
      yaxis: axis(t, "× stock autoregressive", { range: [0, Math.max(top, ceilingFits ? ceiling * 1.1 : 0)], domain: [foot, 1] }),
      yaxis2: axis(t, "", {
        domain: [0, Math.max(0.01, foot - 0.04)], range: [-1, 1], tickvals: [0], ticktext: [width < NARROW ? "n/a" : "no time"],
        showgrid: false, zeroline: false, visible: untimed.length > 0, tickfont: { size: 10.5 },
      }),
    }),
  };
}

const speedup = {
  id: "speedup",
  title: "Speedup over rounds",
  height: (_, width) => (width < NARROW ? 300 : 400),
  empty: (view) =>
    view.points?.length || view.incumbents?.length
      ? null
      : waiting(view, "The first point appears when the stock baselines are measured and a candidate is judged.", "The search ended before a candidate was judged."),
  summary: (view) => {
    const best = view.incumbents?.at(-1);
    const judged = (view.points?.length ?? 0) + untimedTrials(view).length;
    const words = `${f.plural(judged, "judged trial")}.`;
    return best ? `${words} Best plan so far ${f.ratio(best.ratio)} stock autoregressive decoding, from trial ${best.trial}.` : words;
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

// ---- where the time goes

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
  return { reach: row.reachable_floor_ms, own: floor - row.reachable_floor_ms, gap: Math.max(0, row.measured_ms - floor) };
}

function gapFigure(view, t, width) {
  const rows = stageRows(view);
  const narrow = width < NARROW;
  const names = rows.map((row) => row.label ?? row.stage);
  const bar = (values, name, color, pattern) => ({
    type: "bar", orientation: "h", y: names, x: values, name, marker: { color, pattern },
    hovertemplate: `%{y}<br>${name} %{x:.3g} ms<extra></extra>`,
  });
  const parts = rows.map(barParts);
  const reach = parts.map((part) => part.reach);
  const own = parts.map((part) => part.own);
  const gap = parts.map((part) => part.gap);
  const ends = parts.map((part) => part.reach + part.own + part.gap);
  const most = Math.max(...ends, 1e-9);
  const annotations = rows.map((row, i) => ({
    xref: "x", x: ends[i], y: i, xanchor: "left", showarrow: false, xshift: 4,
    text: row.bound === "algorithm" ? `save ${f.significant(row.gap_ms)}` : f.significant(row.measured_ms),
    font: { size: 11.5, color: t.text },
  }));
  if (narrow) {
    for (const [i, name] of names.entries()) {
      annotations.push({ xref: "paper", x: 0, y: i, xanchor: "left", yshift: 15, showarrow: false, text: name, font: { size: 11.5, color: t.muted } });
    }
  }
  return {
    data: [
      bar(reach, "reachable floor", t.series1),
      bar(own, "this plan's floor beyond it", t.series4),
      bar(gap, "above this plan's floor", t.series2, { shape: "/", size: 6, solidity: 0.25, fgcolor: t.surface, fillmode: "overlay" }),
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

const gaps = {
  id: "gaps",
  title: "Where the time goes",
  empty: (view) =>
    view.gaps?.length ? null : waiting(view, "The stages appear when the first plan has been profiled.", "The search ended before a plan was profiled."),
  summary: (view) => {
    const now = view.gap_history?.at(-1);
    return now ? `${f.milliseconds(now.ms_per_token)} per emitted token, of which ${f.milliseconds(now.reachable_ms)} are the reachable floor.` : "Time of each stage against its floors.";
  },
  legend: () => [
    { label: "reachable floor", shape: "box", tone: "series1" },
    { label: "this plan's floor beyond it", shape: "box", tone: "series4" },
    { label: "above this plan's floor", shape: "hatch", tone: "series2" },
  ],
  height: (view, width) => Math.max(250, 52 + stageRows(view).length * (width < NARROW ? 42 : 28)),
  table: (view) => ({
    header: ["stage", "measured ms/token", "own floor ms/token", "reachable floor ms/token", "gap ms/token", "bound by"],
    rows: stageRows(view).map((r) => [r.label ?? r.stage, r.measured_ms, r.own_floor_ms, r.reachable_floor_ms, r.gap_ms, r.bound]),
    show: [String, f.significant, f.significant, f.significant, f.significant, String],
  }),
  figure: gapFigure,
};

// ---- accept length

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
      type: "bar", x: y.map((_, i) => i + 1), y, name, marker: { color },
      hovertemplate: `%{x} tokens: %{y:.1f} % of steps<extra>${name}</extra>`,
    };
  };
  const first = firstProfile(view);
  const data = [bars(view.accept, "best plan", t.series1)];
  if (first) data.unshift(bars(first, "first plan", t.series4));
  return {
    data,
    layout: base(t, {
      barmode: "group", bargap: 0.25,
      xaxis: axis(t, "tokens emitted by a step, bonus token included", { dtick: 1, showgrid: false }),
      yaxis: axis(t, "", { ticksuffix: " %", rangemode: "tozero", nticks: 5 }),
    }),
  };
}

const beforeAfter = (shape) => (view) => [
  ...(firstProfile(view) ? [{ label: "first plan", shape, tone: "series4" }] : []),
  { label: "best plan", shape, tone: "series1" },
];

const accept = {
  id: "accept",
  title: "Accept length",
  empty: (view) =>
    shares(view.accept?.histogram).length ? null : waiting(view, "The histogram appears with the first profile.", "No decode step was profiled."),
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

// ---- acceptance by position

function positionFigure(view, t) {
  const line = (accept, name, color, symbol) => ({
    x: accept.by_position.map((_, i) => i + 1), y: accept.by_position.map((share) => share * 100), name,
    mode: "lines+markers", line: { color, width: 2 }, marker: { symbol, size: 7, color },
    hovertemplate: `position %{x}: %{y:.0f} %<extra>${name}</extra>`,
  });
  const first = firstProfile(view);
  const data = [line(view.accept, "best plan", t.series1, "circle")];
  if (first?.by_position?.length) data.unshift(line(first, "first plan", t.series4, "square-open"));
  return {
    data,
    layout: base(t, {
      xaxis: axis(t, "draft position", { dtick: 1, showgrid: false, rangemode: "tozero", zeroline: false, range: [0.6, Math.max(...data.map((d) => d.x.length)) + 0.4] }),
      yaxis: axis(t, "", { ticksuffix: " %", range: [0, 103], nticks: 6 }),
    }),
  };
}

const position = {
  id: "position",
  title: "Acceptance by position",
  empty: (view) =>
    view.accept?.by_position?.length ? null : waiting(view, "The curve appears with the first profile that drafts.", "No drafts were profiled."),
  summary: (view) => `A first draft token is accepted in ${f.percent(view.accept?.by_position?.[0])} of steps.`,
  legend: (view) => beforeAfter("line")(view).map((entry) => ({ ...entry, marker: entry.label === "first plan" ? "square" : "dot" })),
  table: (view) => {
    const now = view.accept?.by_position ?? [];
    const then = firstProfile(view)?.by_position ?? [];
    return {
      header: ["draft position", "best plan, share accepted", "first plan, share accepted"],
      rows: Array.from({ length: Math.max(now.length, then.length) }, (_, i) => [i + 1, now[i] ?? null, then[i] ?? null]),
      show: [String, (v) => f.percent(v, 1), (v) => f.percent(v, 1)],
    };
  },
  figure: positionFigure,
};

// ---- time per token over rounds

function historyFigure(view, t, width) {
  const rows = view.gap_history ?? [];
  const x = rows.map((row) => row.round);
  const reach = rows.map((row) => row.reachable_ms);
  const measured = rows.map((row) => row.ms_per_token);
  const top = Math.max(...measured, ...reach.filter(f.isNumber)) * 1.16;
  const label = (value, color, shift) =>
    f.isNumber(value)
      ? [{ x: x.at(-1), y: value, text: `${f.significant(value)} ms`, showarrow: false, xanchor: "right", yshift: shift, font: { color, size: 12, weight: 700 } }]
      : [];
  return {
    data: [
      {
        x, y: reach, name: "reachable floor", mode: "lines+markers", line: { color: t.series2, width: 2, dash: "dash" },
        marker: { symbol: "square-open", size: 7, color: t.series2 }, hovertemplate: "round %{x}: floor %{y:.3g} ms<extra></extra>",
      },
      {
        x, y: measured, name: "measured", mode: "lines+markers", line: { color: t.series1, width: 2.5 },
        marker: { symbol: "circle", size: 8, color: t.series1 }, hovertemplate: "round %{x}: measured %{y:.3g} ms<extra></extra>",
      },
    ],
    layout: base(t, {
      margin: { l: width < NARROW ? 40 : 48, r: 16, t: 14, b: 42 },
      annotations: [...label(measured.at(-1), t.series1, 14), ...label(reach.at(-1), t.series2, -14)],
      xaxis: axis(t, "round", { dtick: 1, showgrid: false, zeroline: false, range: [Math.min(...x) - 0.3, Math.max(...x, 1) + 0.3] }),
      yaxis: axis(t, "ms per token", { range: [0, top], nticks: 5 }),
    }),
  };
}

const history = {
  id: "history",
  title: "Time per token by round",
  empty: (view) =>
    view.gap_history?.length ? null : waiting(view, "One point appears with each round's profile.", "No round was profiled."),
  summary: (view) => {
    const last = view.gap_history?.at(-1);
    return last ? `Now ${f.milliseconds(last.ms_per_token)} per token, reachable ${f.milliseconds(last.reachable_ms)}.` : "";
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

export const PLOTS = [speedup, gaps, accept, position, history];
