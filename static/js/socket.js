// A WebSocket that comes back: exponential backoff with jitter, and each time it asks for what it missed.

const FIRST_DELAY = 500; // ms
const LAST_DELAY = 15_000; // ms
const GIVE_UP = new Set([4401, 4403, 4404]); // signed out, not allowed, no such search

/** Milliseconds to wait before attempt number `attempt` (0-based); `random` is in [0, 1). */
export function backoff(attempt, random) {
  return Math.min(LAST_DELAY, FIRST_DELAY * 2 ** Math.min(attempt, 16)) * (0.5 + 0.5 * random);
}

/** The address of the socket for a page at `origin`, asking for events after `seq`. */
export function socketUrl(path, origin, seq) {
  const url = new URL(path, origin);
  url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
  url.searchParams.set("after", String(seq));
  return url.href;
}

/**
 * Keeps one socket open. `after()` gives the last sequence number that was received; `onMessage` gets parsed
 * messages and returns "gap" to have the socket opened again from `after()`; `onState` gets "connecting",
 * "open", "waiting" or "closed" (for good), with {code, delay}.
 */
export function connect({ path, origin, after, onMessage, onState, Socket = WebSocket, random = Math.random }) {
  let socket = null;
  let timer = null;
  let attempt = 0;
  let stopped = false;

  function open() {
    clearTimeout(timer);
    timer = null;
    onState("connecting", { attempt });
    const current = new Socket(socketUrl(path, origin, after()));
    socket = current;
    current.addEventListener("open", () => {
      if (socket === current) onState("open", {});
    });
    current.addEventListener("message", (message) => {
      if (socket !== current) return;
      if (onMessage(JSON.parse(message.data)) === "gap") {
        current.close(1000);
        wait(); // and ask again from the last event without a gap
      } else {
        attempt = 0; // only a server that speaks counts as back
      }
    });
    current.addEventListener("close", (event) => {
      if (socket !== current || stopped) return;
      if (GIVE_UP.has(event.code)) {
        stopped = true;
        socket = null;
        onState("closed", { code: event.code });
      } else {
        wait();
      }
    });
  }

  function wait() {
    socket = null;
    const delay = backoff(attempt, random());
    attempt += 1;
    timer = setTimeout(open, delay);
    onState("waiting", { delay, attempt });
  }

  /** Tries at once: the network is back, the tab is looked at again, or the user asked. */
  function retry() {
    if (stopped || timer === null) return;
    attempt = 0;
    open();
  }

  open();
  return {
    retry,
    close() {
      stopped = true;
      clearTimeout(timer);
      socket?.close(1000);
    },
  };
}
