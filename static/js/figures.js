// The plots of the live page. Each is pure functions of the view: `figure(view, theme, width)` for Plotly, the same
// figures as a `table`, a `summary` sentence, a `legend`, a `height`, and `empty`: why there is nothing to see yet,
// or null. plots.js draws them.

import { accept, position } from "./figures/accept.js";
import { gaps } from "./figures/gaps.js";
import { history } from "./figures/history.js";
import { speedup } from "./figures/speedup.js";

export const PLOTS = [speedup, gaps, accept, position, history];
