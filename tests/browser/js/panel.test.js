import assert from "node:assert/strict";
import { test } from "node:test";

import {
  chance,
  costSentence,
  counts,
  disturbances,
  forcingFacts,
  logits,
  stamp,
  standing,
  timingFacts,
  trialFacts,
  trialOf,
} from "../../../static/js/evidence.js";
import { pairRows, pairs, scale } from "../../../static/js/figures/pairs.js";
import { elapsed } from "../../../static/js/format.js";
import { reasonOf } from "../../../static/js/table.js";
import { clip, plotText, runningText, tokenText } from "../../../static/js/visible.js";

const flat = (parts) => parts.map((part) => part.text ?? `[${part.mark}]`).join("");
const spaces = (text) => text.replaceAll("\u00a0", " ");
const colours = new Proxy({}, { get: (_, name) => `#${String(name)}` });
const draw = (low, high) => low + Math.random() * (high - low);

function evidenceOf(ratios, extra = {}) {
  const sorted = [...ratios].sort((a, b) => a - b);
  return {
    status: "judged",
    verdict: "slower",
    kind: "candidate",
    timing: {
      ratios,
      needed: 1.02,
      comparison: {
        reference: "the incumbent",
        ratio: sorted[Math.floor(sorted.length / 2)],
        low: sorted[0],
        high: sorted.at(-1),
        aa_sigma: 0.01,
        threshold: 0.02,
        candidate_tok_s: 20,
        reference_tok_s: 21,
        warmup_s: 0,
        aa_ratios: [0.99, 1.01],
        conditions: null,
        pairs: ratios.map((ratio, i) => ({
          prompt: `p${i}`,
          reference_s: 2 * (ratio ?? 1),
          candidate_s: 2,
          reference_tokens: 40,
          candidate_tokens: 40,
        })),
        ...extra,
      },
    },
  };
}

test("a token shows its spaces, line feeds and what cannot be seen", () => {
  assert.equal(flat(tokenText(" the")), "[·]the");
  assert.equal(flat(tokenText("\n\n\t")), "[\\n][\\n][\\t]");
  assert.equal(flat(tokenText("a\u200bb\u202e\u0000\u00a0")), "a[U+200B]b[U+202E][U+0000][U+00A0]");
  assert.equal(flat(tokenText("\ufffd")), "[\ufffd]");
  assert.equal(flat(tokenText("")), "[empty]");
  assert.equal(flat(tokenText("\u0301")), "\u25cc\u0301");
  assert.equal(flat(tokenText("\u{e0041}")), "[U+E0041]"); // a tag character: invisible, beyond the first plane
  assert.equal(flat(tokenText("<b>né 文🙂</b>")), "<b>né[·]文🙂</b>");
});

test("running text keeps its spaces and lines, and marks the rest", () => {
  const text = "def f(x):\n\treturn x  # \u202eevil\r\n";
  assert.equal(flat(runningText(text)), "def f(x):\n\treturn x  # [U+202E]evil[\\r]\n");
  const chars = ["a", " ", "\n", "\u0007", "\u2066", "🙂", "<", "\ufeff"];
  for (let i = 0; i < 200; i += 1) {
    const random = Array.from({ length: 12 }, () => chars[Math.floor(Math.random() * chars.length)]).join("");
    for (const parts of [runningText(random), tokenText(random)]) {
      assert.equal(parts.map((part) => part.text ?? part.char).join(""), random); // nothing is lost or moved
      assert.ok(!/[\u0007\u2066\ufeff]/.test(parts.map((part) => part.text ?? part.mark).join("")));
    }
  }
});

test("clipping never cuts a character in two", () => {
  assert.equal(clip("🙂".repeat(5), 3), `…${"🙂".repeat(3)}`);
  assert.equal(clip("abcdef", 3, "first"), "abc…");
  assert.equal(clip("abc", 3), "abc");
});

test("text for a plot holds no markup and no templates of its own", () => {
  assert.equal(plotText("<a href='javascript:x'>&\u202e\n"), "&lt;a href='javascript:x'&gt;&amp;U+202E ");
  const hostile = evidenceOf([0.9, 1.1], { reference: "<i>the</i> incumbent" });
  hostile.timing.comparison.pairs[0].prompt = "<b>%{y}</b>";
  const { data } = pairs.figure(hostile, colours, 900);
  assert.equal(data[0].customdata[0][0], "&lt;b&gt;%{y}&lt;/b&gt;");
  assert.ok(!/<i>|%\{y\}<\/b>&/.test(data[0].hovertemplate));
});

test("an axis is logarithmic where the ratios lie far apart, and always holds all of them", () => {
  for (let i = 0; i < 100; i += 1) {
    const near = Array.from({ length: 8 }, () => draw(0.9, 1.2));
    const far = [...near, draw(4, 9)];
    for (const [values, log] of [
      [near, false],
      [far, true],
    ]) {
      const found = scale(values);
      assert.equal(found.log, log);
      for (const value of values) {
        const at = log ? Math.log10(value) : value;
        assert.ok(found.range[0] < at && at < found.range[1]);
      }
    }
  }
  assert.ok(scale([1, 1]).range[0] < 1);
});

test("the plot has a point for each pair, the band of the interval, the lines, and the reference against itself", () => {
  const ratios = Array.from({ length: 12 }, () => draw(0.93, 1.1));
  const evidence = evidenceOf(ratios);
  const { comparison } = evidence.timing;
  for (const width of [330, 900]) {
    const { data, layout } = pairs.figure(evidence, colours, width);
    assert.deepEqual(data[0].y, ratios);
    assert.deepEqual(data[1].y, comparison.aa_ratios);
    const [band, equal, needed, median] = layout.shapes;
    assert.deepEqual([band.y0, band.y1], [comparison.low, comparison.high]);
    assert.deepEqual([equal.y0, needed.y0, median.y0], [1, 1.02, comparison.ratio]);
    assert.ok(layout.xaxis.tickvals.every((tick) => tick >= 1 && tick <= 12));
    assert.ok(layout.xaxis.range[0] < 1 && layout.xaxis.range[1] > 12);
    assert.equal(data[0].customdata[0][1], elapsed(comparison.pairs[0].reference_s));
  }
  const logarithmic = pairs.figure(evidenceOf([0.5, 1, 4]), colours, 900).layout;
  assert.equal(logarithmic.yaxis.type, "log");
  assert.ok(Math.abs(logarithmic.annotations[0].y) < 1e-12); // the median, 1, in powers of ten
  const alone = pairs.figure(evidenceOf([1, 1.1], { aa_ratios: [] }), colours, 900);
  assert.equal(alone.data.length, 1);
  assert.equal(alone.layout.xaxis2.visible, false);
});

test("pairs without a ratio are left out, and the others keep their number", () => {
  const evidence = evidenceOf([1.1, null, 0.9]);
  assert.deepEqual(
    pairRows(evidence).map((row) => row.number),
    [1, 3],
  );
  assert.deepEqual(pairRows({}), []);
  const { header, rows, show } = pairs.table(evidence);
  assert.ok(rows.every((row) => row.length === header.length && row.length === show.length));
  assert.match(pairs.summary(evidence), /^Median of 3 pairs .* the incumbent, .* a gain must clear 1\.020×\.$/);
});

test("a plot without pairs says why", () => {
  const why = (more) => pairs.empty({ status: "judged", kind: "candidate", timing: null, ...more });
  assert.match(why({ status: "running" }), /appear with the verdict/);
  assert.match(why({ verdict: "lossy" }), /lossy/);
  assert.match(why({ verdict: "crashed" }), /before it was timed/);
  assert.match(why({ kind: "baseline", verdict: "accepted" }), /alone/);
  assert.equal(pairs.empty(evidenceOf([1])), null);
});

test("the address names the trial, and only an address of this search does", () => {
  assert.equal(trialOf("/searches/7/trials/12", "/searches/7"), 12);
  assert.equal(trialOf("/searches/7/trials/0", "/searches/7"), 0);
  for (const path of ["/searches/7", "/searches/71/trials/1", "/searches/7/trials/", "/searches/7/trials/x", "/"])
    assert.equal(trialOf(path, "/searches/7"), null, path);
});

test("evidence is asked for again when the trial starts or is judged, not for each step", () => {
  const row = { trial: 3, status: "running", verdict: null, phase: "timing 1/6" };
  assert.equal(stamp(row), stamp({ ...row, phase: "timing 2/6" }));
  assert.notEqual(stamp(row), stamp({ ...row, status: "judged", verdict: "slower" }));
  assert.notEqual(stamp(undefined), stamp(row));
});

test("a trial without a verdict says where it stands", () => {
  assert.match(standing({ status: "proposed" }), /waits for a worker/);
  assert.equal(standing({ status: "running", attempts: 1, phase: "a" }, "timing 2/6"), "It is being judged: timing 2/6.");
  assert.match(standing({ status: "running", attempts: 2, phase: "start-up" }), /start-up\. Attempt 2\.$/);
  assert.equal(standing({ status: "judged" }), "");
});

const forcing = {
  tokens: 1200,
  exact: 1195,
  near_tie: 4,
  error: 1,
  tie_margin: 9.3e-5,
  near_tie_limit: 3,
  floor_method: "stock scored twice",
  free_run_equal: 7,
  free_run_prompts: 8,
  probing: null,
  power: [],
};

test("the three counts, and what is too many", () => {
  assert.deepEqual(
    counts(forcing).map(({ value, word, tone }) => [value, word, tone]),
    [
      [1195, "exact", "ok"],
      [4, "near-ties", "bad"],
      [1, "error", "bad"],
    ],
  );
  assert.equal(counts({ ...forcing, near_tie: 1 })[1].word, "near-tie");
  assert.equal(counts({ ...forcing, error: 0 })[2].tone, "idle");
});

test("the noise floor, the free run and the probes in words", () => {
  const rows = Object.fromEntries(forcingFacts(forcing));
  assert.match(rows["Noise floor"], /9\.3e−5 logits.*3 of them are allowed in 1,200 tokens/);
  assert.equal(rows["How it was measured"], "Stock scored twice.");
  assert.match(rows["Free run"], /^7 of 8 prompts/);
  assert.ok(!("Probes" in rows));
  const probing = { sharp: 64, sharp_wrong: 1, tied: 24, tied_left: 3, tied_limit: 13, widest: 0.05 };
  const probes = Object.fromEntries(forcingFacts({ ...forcing, probing })).Probes;
  assert.match(probes, /64 prefixes .* 0\.05 logits apart, 1 answer was wrong; at 24 tied .* 3 times \(limit 13\)/);
});

test("small figures keep their size, and nothing is rounded to certain", () => {
  assert.deepEqual([0.0837, 1.5, 1e-4, 9.31e-5, 0, 0.05].map(logits), ["0.0837", "1.5", "1e−4", "9.3e−5", "0", "0.05"]);
  assert.deepEqual([1, 0.9997, 0.62, 0.0002, 0, 0.994].map(chance).map(spaces), [
    "100 %",
    "over 99.9 %",
    "62 %",
    "under 0.1 %",
    "0 %",
    "99.4 %",
  ]);
  assert.deepEqual([0.0123, 1.234, 61].map(elapsed).map(spaces), ["12.3 ms", "1.23 s", "61.0 s"]);
});

test("facts of trial and timing leave out what was not measured", () => {
  const trial = {
    stage_label: "MLP",
    round: 2,
    arm: "random",
    agent: "",
    sources: [1, 4],
    predicted: null,
    timing: null,
    accept_length: 2.5,
  };
  assert.deepEqual(trialFacts(trial), [
    ["stage", "MLP"],
    ["round", "2"],
    ["proposed by", "random"],
    ["builds on", "trial 1, trial 4"],
    ["accept length", "2.50 tokens/step"],
  ]);
  const names = timingFacts(evidenceOf([1, 1.1]).timing).map(([name]) => name);
  assert.deepEqual(names, ["candidate", "incumbent", "A/A spread"]);
  const conditions = { clock_mhz: [1700, 1980], temperature_c: 61, power_w: 400.4, reference_slowdown: 1.0042 };
  const facts = Object.fromEntries(timingFacts(evidenceOf([1], { conditions }).timing));
  assert.equal(facts.clock, "1,700 to 1,980 MHz");
  assert.equal(facts["reference beside this candidate"], "1.004× its time alone");
});

test("what disturbed the timing is told once each, and bounded", () => {
  assert.deepEqual(disturbances({ void: ["load", "load", "other"], throttled: ["power cap"] }), [
    "Throttled: power cap",
    "Block thrown away: load (2 times)",
    "Block thrown away: other",
  ]);
  assert.deepEqual(disturbances(null), []);
  const many = disturbances({ void: Array.from({ length: 40 }, (_, i) => `load ${i}`) });
  assert.equal(many.length, 13);
  assert.match(many.at(-1), /^And 28 more/);
});

test("what the verdict cost, with and without a split", () => {
  assert.equal(spaces(costSentence({ seconds: 38.6, overhead: null })), "Judged in 38.6 s.");
  assert.match(costSentence({ seconds: 38.6, overhead: 1.291 }), /1\.29 times the generations/);
  assert.equal(costSentence({ seconds: null }), "");
});

test("a row gives the first line of a reason; the log is for the panel", () => {
  const judged = (reason) => reasonOf({ status: "judged", reason }, false);
  assert.equal(judged("It failed.\nLast log lines:\nTraceback"), "It failed.");
  assert.equal(judged(""), "–");
  assert.equal(reasonOf({ status: "running", phase: "timing" }, false), "timing");
});
