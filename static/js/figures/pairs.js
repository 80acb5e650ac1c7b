// The timed pairs of one trial: a point for each, their median with its interval, what a gain had to clear, and what
// the reference shows against itself.

import { axis, base, NARROW } from "./common.js";
import * as f from "../format.js";
import { clip, plotText } from "../visible.js";

const LOG_FROM = 3; // largest over smallest ratio from which a linear axis would press the small ones together
const LABEL = 104; // px of the median's label
const STRIP = 0.1; // share of the width that the reference against itself takes
const TICKS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 4, 5, 7, 10, 15, 20, 30, 50, 100];

/** The timed pairs as rows, those without a ratio left out. Pure. */
export function pairRows(evidence) {
  const { comparison, ratios } = evidence.timing ?? { comparison: { pairs: [] }, ratios: [] };
  return comparison.pairs
    .map((pair, i) => ({ number: i + 1, ratio: ratios[i], ...pair }))
    .filter((row) => f.isNumber(row.ratio) && row.ratio > 0);
}

/** Whether the ratios need a logarithmic axis, and the range that holds all of them, 1 and the threshold. Pure. */
export function scale(values) {
  const low = Math.min(...values);
  const high = Math.max(...values);
  if (low > 0 && high / low >= LOG_FROM) {
    const pad = Math.log10(high / low) * 0.08;
    return { log: true, range: [Math.log10(low) - pad, Math.log10(high) + pad] };
  }
  const pad = Math.max((high - low) * 0.1, 0.004);
  return { log: false, range: [low - pad, high + pad] };
}

/** Decimals that tell the ends of an interval apart. */
function digits(comparison) {
  return comparison.high - comparison.low < 0.02 || Math.abs(comparison.ratio - 1) < 0.05 ? 3 : 2;
}

const times = (value, places = 2) => `${f.number(value, places)}×`;

function pairsFigure(evidence, t, width) {
  const rows = pairRows(evidence);
  const { comparison, needed } = evidence.timing;
  const itself = (comparison.aa_ratios ?? []).filter((value) => f.isNumber(value) && value > 0);
  const { ratio, low, high } = comparison;
  const { log, range } = scale([...rows.map((row) => row.ratio), ...itself, 1, ratio, low, high, needed]);
  const end = itself.length ? 1 - STRIP - 0.02 : 1;
  const y = (value) => (log ? Math.log10(value) : value); // annotations count in powers of ten on a log axis
  const across = (value, line, x1 = 1) => ({
    type: "line",
    xref: "paper",
    x0: 0,
    x1,
    yref: "y",
    y0: value,
    y1: value,
    line,
  });
  const label = (value, text, color, extra) => ({
    xref: "paper",
    yref: "y",
    y: y(value),
    text,
    showarrow: false,
    font: { color, size: 11.5 },
    ...extra,
  });
  const places = digits(comparison);
  const count = comparison.pairs.length;
  const step = Math.ceil(count / (width < NARROW ? 7 : 16));
  const room = Math.min(0.4, LABEL / (width * end)); // left of the first point, so that the median's label hides none
  // the labels of two lines that lie close together stand on their far sides, others above their line
  const close = Math.abs(y(ratio) - y(needed)) < 0.14 * (range[1] - range[0]);
  const below = { ratio: close && ratio < needed, needed: close && ratio >= needed };
  const reference = plotText(comparison.reference);
  const data = [
    {
      x: rows.map((row) => row.number),
      y: rows.map((row) => row.ratio),
      mode: "markers",
      name: "pair",
      marker: { color: t.series1, size: rows.length > 40 ? 6 : 9, line: { width: 1.25, color: t.surface } },
      customdata: rows.map((row) => [
        plotText(clip(row.prompt, 48, "first")),
        f.elapsed(row.reference_s),
        f.plural(row.reference_tokens, "token"),
        f.elapsed(row.candidate_s),
        f.plural(row.candidate_tokens, "token"),
      ]),
      hovertemplate:
        `pair %{x}, prompt %{customdata[0]}: %{y:.3f}×<br>${reference}: %{customdata[1]}, %{customdata[2]}` +
        "<br>candidate: %{customdata[3]}, %{customdata[4]}<extra></extra>",
    },
  ];
  if (itself.length) {
    data.push({
      x: itself.map((_, i) => (i % 5) - 2), // side by side, so that equal ones can be told apart
      y: itself,
      xaxis: "x2",
      mode: "markers",
      name: "A/A",
      marker: { color: t.series4, size: 5, symbol: "diamond" },
      hovertemplate: `${reference} against itself: %{y:.3f}×<extra></extra>`,
    });
  }
  return {
    data,
    layout: base(t, {
      margin: { l: width < NARROW ? 46 : 62, r: 14, t: 14, b: 42 },
      shapes: [
        {
          type: "rect",
          xref: "paper",
          x0: 0,
          x1: end,
          yref: "y",
          y0: low,
          y1: high,
          layer: "below",
          fillcolor: t.series1,
          opacity: 0.16,
          line: { width: 0 },
        },
        across(1, { color: t.series4, width: 1.5, dash: "dot" }),
        across(needed, { color: t.series2, width: 1.75, dash: "dash" }),
        across(ratio, { color: t.series1, width: 2.5 }, end),
      ],
      annotations: [
        label(ratio, `median ${times(ratio, places)}`, t.series1, {
          x: 0.005,
          xanchor: "left",
          yshift: below.ratio ? -9 : 9,
          font: { color: t.series1, size: 12.5, weight: 700 },
        }),
        label(needed, `must clear ${times(needed, 3)}`, t.series2, {
          x: end - 0.005,
          xanchor: "right",
          yshift: below.needed ? -9 : 9,
        }),
      ],
      xaxis: axis(t, "pair, in the order of timing", {
        domain: [0, end],
        range: [0.7 - (count * room) / (1 - room), count + 0.7],
        tickvals: Array.from({ length: Math.ceil(count / step) }, (_, i) => 1 + i * step),
        showgrid: false,
        zeroline: false,
      }),
      xaxis2: axis(t, "A/A", {
        domain: [1 - STRIP, 1],
        range: [-4, 4],
        showgrid: false,
        zeroline: false,
        showticklabels: false,
        visible: itself.length > 0,
        anchor: "y",
      }),
      yaxis: axis(t, width < NARROW ? "" : `speed, × ${reference.replace(/^the /, "")}`, {
        range,
        zeroline: false,
        ...(log
          ? { type: "log", tickvals: TICKS, ticktext: TICKS.map((value) => `${value}×`) }
          : { nticks: 6, ticksuffix: "×" }),
      }),
    }),
  };
}

export const pairs = {
  id: "pairs",
  title: "Timed pairs",
  height: (_, width) => (width < NARROW ? 260 : 300),
  empty: (evidence) => {
    if (pairRows(evidence).length) return null;
    if (evidence.status !== "judged") return "The pairs appear with the verdict.";
    if (evidence.kind === "baseline") return "The starting plan is timed alone: there is nothing yet to pair it with.";
    if (evidence.verdict === "lossy") return "Not timed: token forcing had already shown that it is lossy.";
    return "It ended before it was timed.";
  },
  summary: (evidence) => {
    const { comparison, needed } = evidence.timing;
    const places = digits(comparison);
    return (
      `Median of ${f.plural(comparison.pairs.length, "pair")} ${times(comparison.ratio, places)} ` +
      `${comparison.reference}, 95\u00a0% interval ${f.number(comparison.low, places)} to ` +
      `${times(comparison.high, places)}; a gain must clear ${times(needed, 3)}.`
    );
  },
  legend: (evidence) => [
    { label: "pair", shape: "dot", tone: "series1" },
    { label: "median", shape: "line", tone: "series1" },
    { label: "95\u00a0% interval", shape: "band", tone: "series1" },
    { label: "noise threshold", shape: "dash", tone: "series2" },
    { label: "equal speed", shape: "dash", tone: "series4" },
    ...(evidence.timing.comparison.aa_ratios?.length
      ? [{ label: "A/A: the reference against itself", shape: "diamond", tone: "series4" }]
      : []),
  ],
  table: (evidence) => ({
    header: ["pair", "prompt", "speed", "reference, s", "candidate, s", "reference, tokens", "candidate, tokens"],
    rows: pairRows(evidence).map((row) => [
      row.number,
      row.prompt,
      row.ratio,
      row.reference_s,
      row.candidate_s,
      row.reference_tokens,
      row.candidate_tokens,
    ]),
    show: [String, String, (v) => times(v, 3), (v) => f.number(v, 3), (v) => f.number(v, 3), f.number, f.number],
  }),
  figure: pairsFigure,
};
