// Draws the plots of figures.js: throttled, only what changed, with legend, table, CSV and PNG beside each.

import { h, reconcile, s, saveFile, setText } from "./dom.js";
import { PLOTS } from "./figures.js";
import * as f from "./format.js";
import { glyph } from "./glyphs.js";

const PAUSE = 250; // ms between two updates: at most four a second
const DEFAULT_HEIGHT = 290; // px
const PICTURE = { width: 1200, height: 720 }; // px of a download, drawn at twice that
const PICTURE_FONT = "Arial, Helvetica, sans-serif"; // a picture cannot load the page's fonts

/** The theme's colours and fonts, as Plotly needs them. */
function theme() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(`--${name}`).trim();
  const names = ["text", "muted", "faint", "line", "surface", "sunken", "sans", "ok", "warn", "bad", "idle"];
  return {
    ...Object.fromEntries(names.map((name) => [name, read(name)])),
    ...Object.fromEntries([1, 2, 3, 4].map((i) => [`series${i}`, read(`series-${i}`)])),
  };
}

/** Resolves with Plotly when its script has run; rejects where it could not be loaded. */
function plotly() {
  if (window.Plotly) return Promise.resolve(window.Plotly);
  const script = document.getElementById("plotly-script");
  return new Promise((resolve, reject) => {
    script.addEventListener("load", () => resolve(window.Plotly));
    script.addEventListener("error", () => reject(new Error("plotly-basic.min.js could not be loaded")));
  });
}

function swatch({ shape, tone, marker, verdict }) {
  if (verdict) return glyph(verdict);
  const icon = s("svg", {
    viewBox: "0 0 22 12",
    width: 22,
    height: 12,
    "aria-hidden": "true",
    class: `swatch ${tone}`,
  });
  if (shape === "box" || shape === "hatch") {
    icon.append(s("rect", { x: 5, y: 0.5, width: 12, height: 11, rx: 2, fill: "currentColor" }));
    if (shape === "hatch") icon.append(s("path", { d: "M6 11 16 1M5 6l5-5M12 11l5-5", class: "hatch" }));
    return icon;
  }
  if (shape === "band") {
    icon.append(s("rect", { x: 3, y: 1, width: 16, height: 10, rx: 2, fill: "currentColor", opacity: 0.28 }));
    return icon;
  }
  if (shape === "dot" || shape === "diamond") {
    const diamond = s("path", { d: "M11 2l4 4-4 4-4-4z", fill: "currentColor" });
    icon.append(shape === "dot" ? s("circle", { cx: 11, cy: 6, r: 4.5, fill: "currentColor" }) : diamond);
    return icon;
  }
  const dash = shape === "dash" ? "5 3" : null;
  icon.append(s("path", { d: "M0 6h22", stroke: "currentColor", "stroke-width": 2.5, "stroke-dasharray": dash }));
  if (marker === "dot") icon.append(s("circle", { cx: 11, cy: 6, r: 4, fill: "currentColor" }));
  if (marker === "square") icon.append(s("rect", { x: 7.5, y: 2.5, width: 7, height: 7, class: "hollow" }));
  return icon;
}

function figureTable({ header, rows, show }) {
  const numeric = header.map((_, i) => i > 0 && rows.some((row) => typeof row[i] === "number"));
  const look = (i) => ({ class: numeric[i] ? "num" : null });
  const head = header.map((name, i) => h("th", { scope: "col", ...look(i) }, name));
  const body = rows.map((row) => {
    const text = row.map((value, i) => (value === null || value === undefined ? f.NONE : show[i](value)));
    return h(
      "tr",
      {},
      h("th", { scope: "row" }, text[0]),
      text.slice(1).map((cell, i) => h("td", look(i + 1), cell)),
    );
  });
  return h("table", {}, h("thead", {}, h("tr", {}, head)), h("tbody", {}, body));
}

/** Plotly on its own page: the legend inside the picture, a title and a background. */
function exported(plot, view, colours) {
  const { data, layout } = plot.figure(view, colours, PICTURE.width);
  const left = layout.margin.l + 40;
  return {
    data,
    layout: {
      ...layout,
      ...PICTURE,
      font: { ...layout.font, family: PICTURE_FONT },
      margin: { l: left, r: 40, t: 80, b: 110 },
      paper_bgcolor: colours.surface,
      title: { text: plot.title, x: 0.02, font: { size: 20, color: colours.text } },
      showlegend: true,
      legend: { orientation: "h", traceorder: "normal", x: 0, y: -0.14, yanchor: "top", font: { size: 13 } },
    },
  };
}

function createCard(plot, section, searchName) {
  const find = (name) => section.querySelector(`[data-part="${name}"]`);
  const area = find("plot");
  const parts = { legend: find("legend"), summary: find("summary"), empty: find("empty"), table: find("table") };
  const [csv, png] = [find("csv"), find("png")];
  const details = section.querySelector("details");
  let drawn = ""; // what the plot shows, as text
  let listed = ""; // what the table shows, as text
  let view = null;
  let Plotly = null;

  csv.addEventListener("click", () => {
    const { header, rows } = plot.table(view);
    saveFile(`${f.fileName(searchName, plot.id)}.csv`, f.csv(header, rows), "text/csv");
  });
  png.addEventListener("click", async () => {
    const picture = exported(plot, view, theme());
    const address = await Plotly.toImage(picture, { format: "png", ...PICTURE, scale: 2 });
    const bytes = Uint8Array.from(atob(address.split(",")[1]), (char) => char.charCodeAt(0));
    saveFile(`${f.fileName(searchName, plot.id)}.png`, new Blob([bytes], { type: "image/png" }));
  });

  function words() {
    const sentence = plot.empty(view);
    parts.empty.hidden = sentence === null;
    area.hidden = sentence !== null;
    details.hidden = sentence !== null;
    csv.disabled = sentence !== null;
    png.disabled = sentence !== null || !Plotly;
    setText(parts.empty.querySelector("p"), sentence ?? "");
    parts.empty.classList.toggle("over", ["finished", "failed", "judged"].includes(view.status));
    setText(parts.summary, sentence === null ? plot.summary(view) : "");
    const legend = sentence === null ? plot.legend(view) : [];
    reconcile(
      parts.legend,
      legend,
      (entry) => entry.label,
      JSON.stringify,
      (entry) => h("li", {}, swatch(entry), entry.label),
    );
    if (sentence === null) {
      area.setAttribute("aria-label", `${plot.title}. ${plot.summary(view)} The figures are in the table below.`);
      const table = plot.table(view);
      const now = JSON.stringify([table.header, table.rows]);
      if (now !== listed) parts.table.replaceChildren(figureTable(table));
      listed = now;
    }
    return sentence === null;
  }

  function draw(colours) {
    const width = area.clientWidth;
    if (!Plotly || width === 0) return;
    const height = plot.height ? plot.height(view, width) : DEFAULT_HEIGHT;
    const figure = plot.figure(view, colours, width);
    const layout = { ...figure.layout, width, height };
    const now = JSON.stringify([figure.data, layout]);
    if (now === drawn) return;
    drawn = now;
    Plotly.react(area, figure.data, layout, { displayModeBar: false, responsive: false });
    area.dataset.updates = String(Number(area.dataset.updates ?? 0) + 1);
  }

  return {
    area,
    update(newView, colours, library) {
      view = newView;
      Plotly = library;
      if (words()) draw(colours);
    },
  };
}

/** Finds the cards of `plots` in the page and returns `render(view)`, which draws them soon, at most four times a
 * second. */
export function createPlots(searchName, plots = PLOTS) {
  const cards = plots.map((plot) => createCard(plot, document.querySelector(`[data-plot="${plot.id}"]`), searchName));
  let library = null;
  let view = null;
  let timer = null;
  let last = -Infinity;

  function pass() {
    timer = null;
    const colours = theme();
    for (const card of cards) card.update(view, colours, library);
    last = performance.now();
  }

  function schedule() {
    if (timer !== null || view === null) return;
    const wait = Math.max(0, last + PAUSE - performance.now());
    timer = setTimeout(pass, wait);
  }

  plotly().then(
    (loaded) => {
      library = loaded;
      schedule();
    },
    () => {
      document.getElementById("plots-missing").hidden = false;
    },
  );
  const observer = new ResizeObserver(schedule);
  for (const card of cards) observer.observe(card.area.parentElement);
  document.addEventListener("themechange", schedule);

  return function render(newView) {
    view = newView;
    schedule();
  };
}
