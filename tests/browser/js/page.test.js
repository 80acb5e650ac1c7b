import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { test } from "node:test";

import { allowed, curl } from "../../../static/js/actions.js";
import { lanes, period, spans } from "../../../static/js/activity.js";
import { PLOTS } from "../../../static/js/figures.js";
import { shares } from "../../../static/js/figures/accept.js";
import { barParts, stageRows } from "../../../static/js/figures/gaps.js";
import { stockSpeculative, untimedTrials } from "../../../static/js/figures/speedup.js";
import { facts, statusWord } from "../../../static/js/headline.js";
import { describe, replaces, tone } from "../../../static/js/log.js";
import { candidatesCsv, matches } from "../../../static/js/table.js";

const line = (event, labels) =>
  describe(event, labels)
    .map((part) => (typeof part === "string" ? part : part.strong))
    .join("")
    .replaceAll("\u00a0", " ");
const judged = (trial, judgement) => ({ seq: 9, time: 9, type: "trial_judged", data: { trial, judgement } });
const colours = new Proxy({}, { get: (_, name) => `#${String(name)}` });

const candidate = {
  trial: 12,
  round: 3,
  kind: "candidate",
  agent: "agent-0",
  arm: "bandit:gemm",
  stage: "verify.mlp",
  status: "judged",
  changes: [
    { lever: "gemm", from: "library", to: "packed" },
    { lever: "compile", from: false, to: true },
  ],
  rationale: "The MLP is the largest gap.",
  predicted: 1.2,
  verdict: "accepted",
  reason: "Interval +10 to +14 %.",
  ratio: 1.12,
  low: 1.1,
  high: 1.14,
  accept_length: 2.5,
  forcing: { exact: 480, near_tie: 1, error: 0, near_tie_limit: 2 },
  seconds: 20,
};

test("log lines say what happened, with figures and units", () => {
  assert.equal(
    line(judged(7, { verdict: "accepted", reason: "1.12x (1.10 to 1.14), clear." })),
    "trial 7 accepted: 1.12x (1.10 to 1.14), clear.",
  );
  assert.equal(line(judged(8, { verdict: "timed out", reason: "No answer." })), "trial 8 timed out: No answer.");
  const profiled = {
    type: "profiled",
    data: {
      round: 2,
      ms_per_token: 34.12,
      stages: [
        { stage: "draft", gap_ms: 1 },
        { stage: "verify.mlp", gap_ms: 12 },
      ],
    },
  };
  assert.equal(
    line(profiled, { "verify.mlp": "MLP" }),
    "profile of round 2: 34.1 ms per token, largest gap MLP, 12.0 ms",
  );
  assert.equal(
    line({ type: "candidate_proposed", data: { trial: 3, kind: "merge", changes: { compile: true, gemm: "packed" } } }),
    "trial 3 proposed (merge): compile = on, gemm = packed",
  );
  assert.equal(line({ type: "something_new", data: {} }), "something new");
});

test("a trial's progress replaces its last line; the verdict does not", () => {
  const step = (trial) => ({ type: "trial_progress", data: { trial, phase: "timing" } });
  assert.ok(replaces(step(3), step(3)));
  assert.ok(!replaces(step(3), step(4)));
  assert.ok(!replaces(step(3), judged(3, { verdict: "slower" })));
  assert.ok(!replaces(null, step(3)));
  assert.equal(tone(judged(3, { verdict: "lossy" })), "bad");
});

test("the filter takes words and key:value, and verdicts", () => {
  const yes = [
    "",
    "packed",
    "COMPILE on",
    "stage:verify.mlp",
    "lever:gemm bandit",
    "trial:12",
    "round:3",
    "stage:mlp largest",
  ];
  const no = ["slower", "stage:draft", "trial:1", "round:33", "gemm nothing", "lever:threads"];
  for (const query of yes) assert.ok(matches(candidate, query, ""), query);
  for (const query of no) assert.ok(!matches(candidate, query, ""), query);
  assert.ok(matches(candidate, "", "accepted"));
  assert.ok(!matches(candidate, "", "lossy"));
  assert.ok(!matches(candidate, "", "open"));
  assert.ok(matches({ ...candidate, status: "running", verdict: null }, "", "open"));
});

test("the candidates' CSV has one cell for each column", () => {
  const [header, row] = candidatesCsv([candidate]).trim().split("\r\n");
  assert.equal(row.split(",").length, header.split(",").length);
  const cells = Object.fromEntries(header.split(",").map((name, i) => [name, row.split(",")[i]]));
  assert.equal(cells.changes, "gemm: library -> packed; compile: off -> on");
  assert.deepEqual([cells.ratio, cells.tokens_near_tie, cells.seconds], ["1.12", "1", "20"]);
});

test("the curl command survives a shell, quotes and all", () => {
  const deployment = { target: '/models/it\'s "here" $HOME', drafter: "ngram" };
  const command = curl({ deployment, budget: { seconds: 60, trials: 4, seconds_used: 3 } }, "http://127.0.0.1:8000");
  const words = execFileSync("sh", [
    "-c",
    `curl() { for word; do printf '%s\\0' "$word"; done; }; SPECPILOT_TOKEN=t; ${command}`,
  ])
    .toString()
    .split("\0");
  assert.deepEqual(words.slice(0, 3), ["-X", "POST", "http://127.0.0.1:8000/api/searches"]);
  assert.ok(words.includes("Authorization: Bearer t"));
  assert.deepEqual(JSON.parse(words[words.indexOf("-d") + 1]), { deployment, budget: { seconds: 60, trials: 4 } });
});

test("what a status allows", () => {
  assert.deepEqual(allowed("running"), { pause: true, resume: false, cancel: true });
  assert.deepEqual(allowed("paused"), { pause: false, resume: true, cancel: true });
  for (const status of ["cancelling", "finished", "failed"])
    assert.ok(!Object.values(allowed(status)).some(Boolean), status);
});

test("a trial started again keeps its newest start; a running one is open", () => {
  const at = (type, time, data) => ({ type, time, data });
  const events = [
    at("trial_started", 10, { trial: 1, worker: "b" }),
    at("trial_started", 30, { trial: 1, worker: "a" }),
    at("trial_judged", 50, { trial: 1, judgement: { verdict: "slower" } }),
    at("trial_started", 60, { trial: 2, worker: "a" }),
  ];
  assert.deepEqual(spans(events), [
    { trial: 1, worker: "a", start: 30, end: 50, verdict: "slower" },
    { trial: 2, worker: "a", start: 60, end: null, verdict: null },
  ]);
  const [lane] = lanes(
    {
      candidates: [
        { trial: 1, status: "judged" },
        { trial: 2, status: "running", phase: "timing" },
      ],
    },
    events,
  );
  assert.equal(lane.worker, "a");
  assert.equal(lane.now.trial, 2);
  assert.deepEqual(period(events, 100), { start: 10, end: 100 });
  assert.equal(period(events, 100_000).start, 100_000 - 1200);
});

test("stages keep the engine's order, and unknown ones come last", () => {
  const gaps = ["verify.mlp", "draft", "new.stage", "algorithm"].map((stage) => ({ stage }));
  const view = { stages: ["draft", "verify.qkv", "verify.mlp", "algorithm"].map((name) => ({ name })), gaps };
  assert.deepEqual(
    stageRows(view).map((row) => row.stage),
    ["draft", "verify.mlp", "algorithm", "new.stage"],
  );
});

test("a bar's parts sum to what was measured; draft quality shows its saving alone", () => {
  for (let i = 0; i < 100; i += 1) {
    const reach = Math.random() * 5;
    const own = reach + Math.random() * 3;
    const measured = own + Math.random() * 4;
    const parts = barParts({
      bound: "memory",
      measured_ms: measured,
      own_floor_ms: own,
      reachable_floor_ms: reach,
      gap_ms: measured - reach,
    });
    assert.ok(Math.abs(parts.reach + parts.own + parts.gap - measured) < 1e-9);
    assert.ok(Math.min(parts.reach, parts.own, parts.gap) >= 0);
  }
  assert.deepEqual(
    barParts({ bound: "algorithm", measured_ms: 20, own_floor_ms: 20, reachable_floor_ms: 16, gap_ms: 4 }),
    { reach: 0, own: 0, gap: 4 },
  );
});

test("shares leave index 0 out and sum to one", () => {
  assert.deepEqual(shares([0, 3, 1]), [0.75, 0.25]);
  assert.deepEqual(shares([0, 0]), []);
  assert.deepEqual(shares(undefined), []);
});

test("trials without a time are those judged and not among the points", () => {
  const view = {
    points: [{ trial: 1 }],
    candidates: [
      { trial: 1, status: "judged" },
      { trial: 2, status: "judged", ratio: null },
      { trial: 3, status: "running" },
    ],
  };
  assert.deepEqual(
    untimedTrials(view).map((c) => c.trial),
    [2],
  );
});

test("stock speculative is given against stock autoregressive, or not at all", () => {
  assert.equal(
    stockSpeculative({
      stocks: [
        { name: "autoregressive", tok_s: 10 },
        { name: "speculative", tok_s: 8 },
      ],
    }),
    0.8,
  );
  assert.equal(stockSpeculative({ stocks: [{ name: "autoregressive", tok_s: 10 }] }), null);
});

test("every plot has words for an empty view, running or ended, and draws none of it", () => {
  for (const plot of PLOTS) {
    const running = plot.empty({ status: "running" });
    const ended = plot.empty({ status: "finished" });
    assert.ok(running.length > 10 && ended.length > 10 && running !== ended, plot.id);
  }
});

test("every plot with data has a finite figure and a table with the same count of figures", () => {
  const view = {
    status: "running",
    round: 1,
    stages: [{ name: "verify.mlp", label: "MLP" }],
    headline: { ceiling_ratio: 4, over_autoregressive: { ratio: 1.5, low: 1.4, high: 1.6 } },
    stocks: [],
    points: [
      { trial: 0, round: 0, kind: "baseline", ratio: 0.8, verdict: "accepted" },
      { trial: 1, round: 1, kind: "candidate", ratio: 1.5, verdict: "accepted" },
    ],
    incumbents: [
      { trial: 0, round: 0, ratio: 0.8, low: 0.7, high: 0.9 },
      { trial: 1, round: 1, ratio: 1.5, low: 1.4, high: 1.6 },
    ],
    candidates: [candidate, { ...candidate, trial: 13, verdict: "crashed", ratio: null }],
    gaps: [
      {
        stage: "verify.mlp",
        label: "MLP",
        measured_ms: 9,
        own_floor_ms: 5,
        reachable_floor_ms: 3,
        gap_ms: 6,
        bound: "memory",
      },
    ],
    gap_history: [
      { round: 0, ms_per_token: 30, reachable_ms: null },
      { round: 1, ms_per_token: 20, reachable_ms: 8 },
    ],
    accept: { histogram: [0, 4, 3], by_position: [0.7, 0.4], accept_length: 1.43 },
    first_profile_accept: { histogram: [0, 6, 1], by_position: [0.5], accept_length: 1.14 },
  };
  for (const plot of PLOTS) {
    assert.equal(plot.empty(view), null);
    assert.ok(plot.summary(view).length > 10);
    const { header, rows, show } = plot.table(view);
    assert.ok(rows.length > 0);
    for (const row of rows) assert.equal(row.length, header.length);
    assert.equal(show.length, header.length);
    for (const width of [330, 900]) {
      const { data, layout } = plot.figure(view, colours, width);
      assert.ok(data.length > 0);
      for (const trace of data) assert.equal(trace.x.length, trace.y.length);
      for (const range of [layout.xaxis.range, layout.yaxis.range].filter(Boolean))
        assert.ok(range.every(Number.isFinite), plot.id);
      assert.ok(!layout.showlegend); // the page draws the legend, so it can cover nothing
    }
  }
});

test("facts shorten paths and keep them whole beside", () => {
  const deployment = {
    target: "/models/Qwen3-8B/",
    drafter: "ngram",
    platform: "cpu",
    dtype: "fp32",
    regime: { batch: 1, max_prompt_tokens: 512, max_new_tokens: 1024, temperature: 0, prompts: "shipped" },
  };
  const found = Object.fromEntries(facts(deployment).map(([name, ...rest]) => [name, rest]));
  assert.deepEqual(found.target, ["Qwen3-8B", "/models/Qwen3-8B/"]);
  assert.equal(found.regime[0], "batch 1, up to 512 in / 1,024 out, greedy");
});

test("the status pill says the round, and that a search was cancelled", () => {
  assert.equal(statusWord({ status: "running", round: 3 }).word, "Round 3 running");
  assert.equal(statusWord({ status: "finished", finished: { reason: "cancelled" } }).word, "Cancelled");
  assert.equal(statusWord({ status: "finished", finished: { reason: "plateau" } }).word, "Finished");
});
