// What the figures share: the plain layout, an axis, and the words for a plot that is still empty.

export const NARROW = 520; // px of plot width under which labels move out of the margins

/** The layout that every plot starts from; `t` holds the theme's colours and fonts. */
export function base(t, extra = {}) {
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

/** An axis that cannot be zoomed, so that a finger on a plot scrolls the page. */
export function axis(t, title, extra = {}) {
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

/** The sentence of an empty plot: what it waits for, or that it will stay empty. */
export function waiting(view, running, ended) {
  return view.status === "finished" || view.status === "failed" ? ended : running;
}
