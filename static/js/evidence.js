// What the evidence of a trial says in words and rows. Pure: no document.

import * as f from "./format.js";

/** A panel asks for its evidence again when this changes: the trial has started, or has its verdict. Pure. */
export function stamp(candidate) {
  return JSON.stringify([candidate?.trial ?? null, candidate?.status ?? null, candidate?.verdict ?? null]);
}

/** The part of a page's address that names a trial, or null: "/searches/7/trials/12" is 12. */
export function trialOf(pathname, pageUrl) {
  const found = pathname.startsWith(`${pageUrl}/trials/`) && /^\d{1,9}$/.exec(pathname.slice(pageUrl.length + 8));
  return found ? Number(found[0]) : null;
}

/** The sentence under the verdict while there is none: where the trial stands. */
export function standing(evidence, phase) {
  if (evidence.status === "judged") return "";
  if (evidence.status === "proposed") return "It waits for a worker.";
  const attempt = evidence.attempts > 1 ? ` Attempt ${evidence.attempts}.` : "";
  return `It is being judged: ${phase || evidence.phase || "starting"}.${attempt}`;
}

/** Facts about the trial as label and value. */
export function trialFacts(evidence) {
  const { timing } = evidence;
  return [
    ["stage", evidence.stage_label],
    ["round", evidence.round > 0 ? String(evidence.round) : ""],
    ["proposed by", evidence.arm],
    ["agent", evidence.agent],
    ["builds on", evidence.sources.length ? evidence.sources.map((trial) => `trial ${trial}`).join(", ") : ""],
    ["predicted", f.isNumber(evidence.predicted) ? f.change(evidence.predicted) : ""],
    ["measured", timing ? f.change(timing.comparison.ratio) : ""],
    ["accept length", f.isNumber(evidence.accept_length) ? `${f.number(evidence.accept_length, 2)} tokens/step` : ""],
  ].filter(([, value]) => value);
}

/** The three counts, as {value, word, note, tone}. */
export function counts({ exact, near_tie: ties, near_tie_limit: limit, error, tokens }) {
  return [
    { value: exact, word: "exact", note: `of ${f.plural(tokens, "token")}`, tone: "ok" },
    {
      value: ties,
      word: ties === 1 ? "near-tie" : "near-ties",
      note: `limit ${f.number(limit)}`,
      tone: ties > limit ? "bad" : "warn",
    },
    { value: error, word: error === 1 ? "error" : "errors", note: "none is allowed", tone: error ? "bad" : "idle" },
  ];
}

/** A gap between logits, which may be far below one: "0.83", "1.2e−5". */
export function logits(value) {
  if (!f.isNumber(value)) return f.NONE;
  if (value !== 0 && Math.abs(value) < 1e-3) return value.toExponential(1).replace("e-", "e−").replace(".0e", "e");
  return String(Number(value.toPrecision(3))).replace("-", "−");
}

/** A chance in percent that says 100 only where it is certain: 0.9997 is "over 99.9 %". */
export function chance(share) {
  if (share < 1 && share > 0.999) return `over ${f.percent(0.999, 1)}`;
  if (share > 0 && share < 0.001) return `under ${f.percent(0.001, 1)}`;
  return f.percent(share, share > 0.99 && share < 1 ? 1 : 0);
}

/** What else token forcing found, as label and sentence. */
export function forcingFacts(forcing) {
  const { probing } = forcing;
  const rows = [
    [
      "Noise floor",
      `Stock's choice and the candidate's up to ${logits(forcing.tie_margin)} logits apart are a near-tie; ` +
        `${f.number(forcing.near_tie_limit)} of them are allowed in ${f.plural(forcing.tokens, "token")}.`,
    ],
    ["How it was measured", sentenceOf(forcing.floor_method)],
    [
      "Free run",
      `${f.number(forcing.free_run_equal)} of ${f.plural(forcing.free_run_prompts, "prompt")} have the text, length ` +
        "and end of stock's free run, token by token.",
    ],
  ];
  if (probing) {
    rows.push([
      "Probes",
      `At ${f.plural(probing.sharp, "prefix", "prefixes")} where stock's two leading tokens lie up to ` +
        `${logits(probing.widest)} logits apart, ${f.plural(probing.sharp_wrong, "answer was", "answers were")} wrong; at ` +
        `${f.number(probing.tied)} tied ones the candidate took the other token ` +
        `${f.plural(probing.tied_left, "time")} (limit ${f.number(probing.tied_limit)}).`,
    ]);
  }
  return rows.filter(([, sentence]) => sentence);
}

function sentenceOf(text) {
  const words = (text ?? "").trim();
  if (!words) return "";
  return `${words[0].toUpperCase()}${words.slice(1)}${/[.!?]$/.test(words) ? "" : "."}`;
}

/** The state of the machine while pairs were timed, and the sides' rates, as label and value. */
export function timingFacts({ comparison }) {
  const at = comparison.conditions ?? {};
  const [slow, fast] = at.clock_mhz ?? [];
  return [
    ["candidate", f.tokensPerSecond(comparison.candidate_tok_s)],
    [comparison.reference.replace(/^the /, ""), f.tokensPerSecond(comparison.reference_tok_s)],
    ["A/A spread", f.percent(comparison.aa_sigma, 2)],
    ["warm-up, not counted", comparison.warmup_s > 0 ? f.elapsed(comparison.warmup_s) : ""],
    [
      "clock",
      f.isNumber(slow) ? (slow === fast ? `${f.number(slow)} MHz` : `${f.number(slow)} to ${f.number(fast)} MHz`) : "",
    ],
    ["hottest", f.isNumber(at.temperature_c) ? `${f.number(at.temperature_c)} °C` : ""],
    ["highest power", f.isNumber(at.power_w) ? `${f.number(at.power_w)} W` : ""],
    [
      "reference beside this candidate",
      f.isNumber(at.reference_slowdown) ? `${f.number(at.reference_slowdown, 3)}× its time alone` : "",
    ],
  ].filter(([, value]) => value && value !== f.NONE);
}

const MOST_LINES = 12;

/** What disturbed the timing: void blocks and throttle reasons, equal ones once, with how often. */
export function disturbances(conditions) {
  const told = (lines, words) => {
    const times = new Map();
    for (const line of lines ?? []) times.set(line, (times.get(line) ?? 0) + 1);
    return [...times].map(([line, count]) => `${words}: ${line}${count > 1 ? ` (${f.number(count)} times)` : ""}`);
  };
  const lines = [...told(conditions?.throttled, "Throttled"), ...told(conditions?.void, "Block thrown away")];
  const more = lines.length - MOST_LINES;
  return more > 0 ? [...lines.slice(0, MOST_LINES), `And ${f.number(more)} more; the JSON has all.`] : lines;
}

/** The cost of judging in a sentence, or "". */
export function costSentence(evidence) {
  if (!f.isNumber(evidence.seconds) || evidence.seconds <= 0) return "";
  const whole = `Judged in ${f.elapsed(evidence.seconds)}`;
  if (!f.isNumber(evidence.overhead)) return `${whole}.`;
  return `${whole}, ${f.number(evidence.overhead, 2)} times the generations that the verdict needs.`;
}
