// Title, status, headline figures, the largest gap, stock baselines and the bundle.

import { h, reconcile, s, setText } from "./dom.js";
import * as f from "./format.js";
import { stockSpeculative } from "./figures/speedup.js";

/** The last part of a path, or the whole name. */
function shortName(ref) {
  return (
    String(ref ?? "")
      .replace(/\/+$/, "")
      .split("/")
      .at(-1) || f.NONE
  );
}

/** What is tuned, as label and value pairs. Pure. */
export function facts(deployment) {
  const regime = deployment.regime ?? {};
  const lengths = `${f.number(regime.max_prompt_tokens)} in / ${f.number(regime.max_new_tokens)} out`;
  const sampling = regime.temperature > 0 ? `temperature ${regime.temperature}` : "greedy";
  return [
    ["target", shortName(deployment.target), deployment.target],
    ["drafter", shortName(deployment.drafter), deployment.drafter],
    ["regime", `batch ${regime.batch}, up to ${lengths}, ${sampling}`],
    ["traffic", regime.prompts === "shipped" ? "shipped prompts" : shortName(regime.prompts), regime.prompts],
    ["device", `${deployment.platform}, ${deployment.dtype}`],
  ];
}

/** The pill's word: the status, with the round while it runs. Pure. */
export function statusWord(view) {
  const { word, tone } = f.status(view.status);
  if (view.status === "running" && view.round > 0) return { word: `Round ${view.round} running`, tone };
  if (view.status === "finished" && view.finished?.reason === "cancelled") return f.status("cancelled");
  return { word, tone };
}

function meter(head, speculative) {
  const ratio = head.over_autoregressive?.ratio;
  const end = Math.max(head.ceiling_ratio ?? 0, head.over_autoregressive?.high ?? ratio ?? 0, 1, speculative ?? 0);
  const at = (value) => (value / end) * 100;
  const box = s("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", class: "meter", "aria-hidden": "true" });
  box.append(s("rect", { x: 0, y: 0, width: 100, height: 10, class: "meter-track" }));
  if (f.isNumber(ratio)) {
    const { low, high } = head.over_autoregressive;
    box.append(s("rect", { x: 0, y: 0, width: at(ratio), height: 10, class: "meter-fill" }));
    if (f.isNumber(low))
      box.append(
        s("rect", { x: at(low), y: 0, width: Math.max(0.3, at(high) - at(low)), height: 10, class: "meter-interval" }),
      );
  }
  if (f.isNumber(ratio) || head.ceiling_ratio)
    box.append(s("rect", { x: Math.min(99.4, at(1)), y: 0, width: 0.6, height: 10, class: "meter-mark" }));
  return box;
}

function bar(element, used, total) {
  element.hidden = !(total > 0);
  element.max = total > 0 ? total : 1;
  element.value = Math.min(used ?? 0, total ?? 0);
}

/** Wires the top of the page; returns `render(view)`. `file` is the name under which the bundle is downloaded. */
export function createHeadline(root, file) {
  const slots = new Map([...root.querySelectorAll("[data-slot]")].map((element) => [element.dataset.slot, element]));
  const slot = (name) => slots.get(name);
  const put = (name, text) => setText(slot(name), text);

  function speedup(name, figure, waiting) {
    put(`${name}.ratio`, f.ratio(figure?.ratio));
    put(`${name}.interval`, figure ? f.interval(figure.low, figure.high) : "");
    if (slot(`${name}.note`)) put(`${name}.note`, figure ? "95\u00a0% interval" : waiting);
  }

  function figures(view) {
    const head = view.headline ?? {};
    const speculative = stockSpeculative(view);
    const waiting = "not measured yet";
    speedup("autoregressive", head.over_autoregressive, "");
    speedup("speculative", head.over_speculative, waiting);
    speedup("own", head.over_own_autoregressive, waiting);
    const marks = [
      "stock 1×",
      speculative && `stock speculative ${f.ratio(speculative)}`,
      f.isNumber(head.ceiling_ratio) && `ceiling ${f.ratio(head.ceiling_ratio)} if every gap closed`,
    ];
    put(
      "marks",
      head.over_autoregressive || f.isNumber(head.ceiling_ratio)
        ? marks.filter(Boolean).join(" · ")
        : "Appears when the first plan stands against the stock baselines.",
    );
    const mark = JSON.stringify([head.over_autoregressive, head.ceiling_ratio, speculative]);
    if (slot("meter").dataset.mark !== mark) {
      slot("meter").dataset.mark = mark;
      slot("meter").replaceChildren(meter(head, speculative));
    }
    const stock = view.stocks?.find((row) => row.name === "autoregressive")?.tok_s;
    put("rate", f.isNumber(head.tok_s) ? f.tokensPerSecond(head.tok_s) : "");
    put("rate.stock", f.isNumber(head.tok_s) && f.isNumber(stock) ? `stock ${f.tokensPerSecond(stock)}` : "");
    put("accept", f.number(head.accept_length, 2));
    put(
      "accept.note",
      f.isNumber(head.stock_accept_length)
        ? `stock ${f.number(head.stock_accept_length, 2)} · bonus token included`
        : "bonus token included",
    );
    put("roofline", f.percent(head.roofline_share));
    bar(slot("roofline.bar"), head.roofline_share, 1);
    const counts = head.forcing;
    put("errors", counts ? f.number(counts.error) : f.NONE);
    slot("errors").classList.toggle("error", Boolean(counts?.error));
    put("errors.unit", counts ? (counts.error === 1 ? "error" : "errors") : "");
    const ties = counts ? `${f.plural(counts.near_tie, "near-tie")} (limit ${f.number(counts.near_tie_limit)})` : "";
    put("errors.note", counts ? `${f.number(counts.exact)} exact · ${ties}` : "checked in every trial");
    const budget = view.budget ?? {};
    put("trials", f.number(budget.trials_used ?? 0));
    put("trials.total", f.isNumber(budget.trials) ? `/ ${f.plural(budget.trials, "trial")}` : "");
    bar(slot("trials.bar"), budget.trials_used, budget.trials);
    put(
      "seconds",
      f.isNumber(budget.seconds) ? `${f.duration(budget.seconds_used)} of ${f.duration(budget.seconds)}` : "",
    );
    bar(slot("seconds.bar"), budget.seconds_used, budget.seconds);
  }

  function gap(view) {
    const largest = view.largest_gap;
    const ended = view.status === "finished" || view.status === "failed";
    const waiting = ended ? "It was not measured." : "The first profile of the starting plan will name it.";
    const name = largest?.label ?? largest?.stage ?? "";
    put("gap.stage", largest?.sentence.startsWith(name) ? "" : name);
    put("gap.sentence", largest ? largest.sentence : waiting);
  }

  function baselines(view) {
    const rows = view.stocks ?? [];
    slot("stocks.empty").hidden = rows.length > 0;
    reconcile(
      slot("stocks"),
      rows,
      (row) => row.name,
      JSON.stringify,
      (row) =>
        h(
          "li",
          {},
          h("div", {}, h("b", {}, row.name), h("small", {}, row.implementation)),
          h(
            "div",
            { class: "num" },
            f.tokensPerSecond(row.tok_s),
            h(
              "small",
              {},
              f.isNumber(row.accept_length) ? `accept length ${f.number(row.accept_length, 2)}` : "one token per step",
            ),
          ),
        ),
    );
  }

  function ending(view) {
    const failed = view.status === "failed" || view.finished?.reason === "failed";
    const unhappy = failed || (view.status === "finished" && !view.bundle);
    slot("sentence").hidden = unhappy; // a banner says it
    slot("failed").hidden = !failed;
    put("failed.sentence", view.finished?.sentence || view.sentence || "");
    const bundle = view.bundle;
    slot("bundle").hidden = !bundle;
    slot("download").hidden = !bundle;
    slot("no-bundle").hidden = !unhappy || failed;
    put("no-bundle.sentence", view.finished?.sentence ?? "");
    if (!bundle) return;
    put("bundle.size", `${file}, ${f.bytes(bundle.bytes)}`);
    put("bundle.sha", bundle.sha256);
    put("bundle.generate", `python -m engine generate --bundle ${file} --prompt "Why is the sky blue?"`);
    put("bundle.verify", `python -m engine verify --bundle ${file}`);
  }

  return function render(view) {
    const { word, tone } = statusWord(view);
    slot("status").className = `pill ${tone}`;
    put("status.word", word);
    put("title", view.title || slot("title").textContent);
    put("sentence", view.sentence || "");
    if (view.deployment) {
      reconcile(
        slot("facts"),
        facts(view.deployment),
        ([name]) => name,
        JSON.stringify,
        ([name, value, full]) => h("div", {}, h("dt", {}, name), h("dd", { title: full ?? null }, value)),
      );
    }
    figures(view);
    gap(view);
    baselines(view);
    ending(view);
  };
}
