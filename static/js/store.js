// What the page knows: the newest view, the events, the state of the connection. Pure: no document, no socket.

/** @typedef {{seq: number, time: number, type: string, data: object}} Event */

const STATUS_KEYS = ["connection", "workerOnline"];

/**
 * Holds the view (the newest one wins) and the events (each sequence number once, in order).
 *
 * `events` are those that the page was loaded with, in order and without a gap. `lastSeq` is the last event that
 * was received without a gap: a connection asks for what comes after it, so nothing is lost and nothing repeated.
 */
export function createStore(view, events = [], { limit = 2000 } = {}) {
  const listeners = new Set();
  const state = {
    view,
    /** @type {Event[]} */ events: [...events],
    lastSeq: events.at(-1)?.seq ?? 0,
    connection: "connecting",
    workerOnline: null,
  };

  function tell(change) {
    for (const listener of listeners) listener(state, change);
  }

  /** Takes an update. Returns "gap" where an event is missing, so that the caller asks for it again. */
  function update(message) {
    const fresh = [];
    let gap = false;
    for (const event of [...(message.events ?? [])].sort((a, b) => a.seq - b.seq)) {
      if (event.seq <= state.lastSeq) continue; // a repeat
      if (event.seq > state.lastSeq + 1) {
        gap = true;
        break;
      }
      state.lastSeq = event.seq;
      state.events.push(event);
      fresh.push(event);
    }
    const excess = state.events.length - limit;
    if (excess > 0) state.events.splice(0, excess); // the server keeps them
    const newer = Boolean(message.view) && (message.view.seq ?? 0) >= (state.view?.seq ?? 0);
    if (newer) state.view = message.view;
    if (fresh.length || newer) tell({ events: fresh, view: newer });
    return gap ? "gap" : "ok";
  }

  /** Takes news about the connection or the worker. */
  function setStatus(news) {
    const changed = STATUS_KEYS.filter((key) => key in news && news[key] !== state[key]);
    for (const key of changed) state[key] = news[key];
    if (changed.length) tell({ status: changed });
  }

  return {
    state,
    update,
    setStatus,
    subscribe(listener) {
      listeners.add(listener);
      return () => listeners.delete(listener);
    },
  };
}
