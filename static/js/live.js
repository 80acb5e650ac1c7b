// The live page of one search: joins the view in the page, the socket and everything that draws.

import { createActions, wireCopyButtons } from "./actions.js";
import { createActivity } from "./activity.js";
import { setText } from "./dom.js";
import * as f from "./format.js";
import { createHeadline } from "./headline.js";
import { createLog } from "./log.js";
import { createPanel } from "./panel.js";
import { createPlots } from "./plots.js";
import { connect } from "./socket.js";
import { createStore } from "./store.js";
import { createTable } from "./table.js";

const PATIENCE = 1200; // ms without a connection before the page says so
const ENDED = new Set(["finished", "failed"]);

const root = document.getElementById("live");
const embedded = (id) => JSON.parse(document.getElementById(id).textContent);
const name = `search-${root.dataset.search}`;
const store = createStore(embedded("view"), embedded("events"));
const { state } = store;

const headline = createHeadline(document, `specpilot-${name}.zip`);
const plots = createPlots(name);
const table = createTable(document.getElementById("candidates"), name, root.dataset.pageUrl);
const panel = createPanel({
  dialog: document.getElementById("panel"),
  apiUrl: root.dataset.apiUrl,
  pageUrl: root.dataset.pageUrl,
  searchName: name,
  first: "trial" in root.dataset ? Number(root.dataset.trial) : null,
});
const activity = createActivity(document.getElementById("activity"));
const log = createLog(document.getElementById("log"), document.getElementById("log-empty"));
const actions = createActions({
  root,
  csrf: root.dataset.csrf,
  apiUrl: root.dataset.apiUrl,
  getView: () => state.view,
});
wireCopyButtons();

function stageLabels() {
  return Object.fromEntries((state.view.stages ?? []).map((stage) => [stage.name, stage.label]));
}

function drawView() {
  headline(state.view);
  actions(state.view);
  table(state.view);
  panel(state.view);
  activity(state.view, state.events);
  plots(state.view);
  const { word } = f.status(state.view.status);
  document.title = `${state.view.title || "Search"} · ${word} · SpecPilot`;
}

// ---- connection

const banner = document.getElementById("disconnected");
const worker = document.getElementById("worker-offline");
const link = document.getElementById("connection");
let lastNews = Date.now() / 1000;
let impatient = null;

function drawWorker() {
  worker.hidden = state.workerOnline !== false || ENDED.has(state.view.status) || state.view.status === "paused";
}

function drawConnection() {
  const words = { open: "Live", connecting: "Connecting", waiting: "Reconnecting", closed: "Not live" };
  link.dataset.state = state.connection;
  setText(link.querySelector("span"), words[state.connection]);
  if (state.connection === "open") {
    clearTimeout(impatient);
    impatient = null;
    banner.hidden = true;
  } else if (impatient === null && banner.hidden) {
    impatient = setTimeout(showDisconnected, PATIENCE);
  }
}

function showDisconnected() {
  impatient = null;
  setText(
    banner.querySelector("p"),
    `Connection lost at ${f.clock(lastNews)}. The search goes on without this page, which will catch up.`,
  );
  banner.hidden = false;
}

const CLOSED = {
  4401: "You are signed out. Sign in again and this page goes on where it was.",
  4403: "You may not watch this search.",
  4404: "This search is no longer there.",
};

function onState(connection, { code }) {
  store.setStatus({ connection });
  if (connection !== "closed") return;
  clearTimeout(impatient);
  setText(banner.querySelector("p"), CLOSED[code]);
  banner.querySelector("button").hidden = true;
  banner.hidden = false;
}

function onMessage(message) {
  lastNews = Date.now() / 1000;
  if (message.kind === "update") return store.update(message);
  if (message.kind === "status" && "worker_online" in message) store.setStatus({ workerOnline: message.worker_online });
  return "ok";
}

store.subscribe((_, change) => {
  if (change.events?.length) log(change.events, stageLabels());
  if (change.events || change.view) drawView();
  if (change.status) {
    drawConnection();
    drawWorker();
  } else if (change.view) {
    drawWorker();
  }
});

store.setStatus({ workerOnline: root.dataset.workerOnline === "true" });
log(state.events, stageLabels());
drawView();
const socket = connect({
  path: root.dataset.wsUrl,
  origin: location.origin,
  after: () => state.lastSeq,
  onMessage,
  onState,
});
banner.querySelector("button").addEventListener("click", () => socket.retry());
addEventListener("online", () => socket.retry());
document.addEventListener("visibilitychange", () => {
  if (document.visibilityState === "visible") socket.retry();
});
// Lanes move with the clock while something runs.
setInterval(() => {
  if (!ENDED.has(state.view.status) && document.visibilityState === "visible") activity(state.view, state.events);
}, 1000);
