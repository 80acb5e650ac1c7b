// Shapes of the verdicts, the same in pills, legends and plots.

import { h, s } from "./dom.js";
import * as f from "./format.js";

const PATHS = {
  accepted: { d: "M6 1.5a4.5 4.5 0 1 1 0 9 4.5 4.5 0 0 1 0-9z", fill: true },
  slower: { d: "M6 2a4 4 0 1 1 0 8 4 4 0 0 1 0-8z" },
  lossy: { d: "M2 2l8 8M10 2l-8 8", wide: true },
  crashed: { d: "M1.5 2.5h9L6 10.5z", fill: true },
  "timed out": { d: "M2 2h8v8H2z" },
  invalid: { d: "M6 1l5 5-5 5-5-5z" },
};

/** An icon for a verdict. */
export function glyph(verdict) {
  const path = PATHS[verdict] ?? PATHS.slower;
  return s(
    "svg",
    { viewBox: "0 0 12 12", width: 11, height: 11, "aria-hidden": "true", class: `glyph ${f.verdict(verdict).tone}` },
    s("path", {
      d: path.d,
      fill: path.fill ? "currentColor" : "none",
      stroke: path.fill ? null : "currentColor",
      "stroke-width": path.wide ? 2.6 : 1.9,
      "stroke-linecap": "round",
    }),
  );
}

/** A pill with the verdict's word and shape. */
export function verdictPill(name) {
  const look = f.verdict(name);
  return h("span", { class: `pill ${look.tone}` }, glyph(name), look.word);
}

/** A pill with a pulsing dot: something that runs. */
export function dotPill(tone, word) {
  return h("span", { class: `pill ${tone}` }, h("span", { class: "dot", "aria-hidden": "true" }), word);
}
