import assert from "node:assert/strict";
import { beforeEach, mock, test } from "node:test";

import { backoff, connect, socketUrl } from "../../../static/js/socket.js";

class FakeSocket {
  static made = [];

  constructor(url) {
    this.url = url;
    this.listeners = {};
    this.closed = null;
    FakeSocket.made.push(this);
  }

  addEventListener(type, listener) {
    this.listeners[type] = listener;
  }

  close(code) {
    this.closed = code;
  }

  fire(type, detail = {}) {
    this.listeners[type](detail);
  }

  receive(message) {
    this.fire("message", { data: JSON.stringify(message) });
  }
}

const newest = () => FakeSocket.made.at(-1);

function start(overrides = {}) {
  const states = [];
  const link = connect({
    path: "/ws/searches/7",
    origin: "https://host.example",
    after: () => 0,
    onMessage: () => "ok",
    onState: (state, detail) => states.push([state, detail]),
    Socket: FakeSocket,
    random: () => 1,
    ...overrides,
  });
  return { link, states };
}

beforeEach(() => {
  FakeSocket.made = [];
  mock.timers.reset();
  mock.timers.enable({ apis: ["setTimeout"] });
});

test("the address follows the page's scheme and says where to go on", () => {
  assert.equal(socketUrl("/ws/searches/7", "https://a.example", 12), "wss://a.example/ws/searches/7?after=12");
  assert.equal(socketUrl("/ws/searches/7", "http://127.0.0.1:8000", 0), "ws://127.0.0.1:8000/ws/searches/7?after=0");
});

test("waits grow, stay bounded, and are spread", () => {
  const waits = [0, 1, 2, 3, 4, 5, 6, 50].map((attempt) => backoff(attempt, 1));
  assert.deepEqual(waits, [500, 1000, 2000, 4000, 8000, 15000, 15000, 15000]);
  for (let i = 0; i < 200; i += 1) {
    const wait = backoff(i % 12, Math.random());
    assert.ok(wait >= backoff(i % 12, 0) && wait <= 15000);
  }
});

test("a lost connection is opened again after the wait, from the last event received", () => {
  let last = 3;
  const { states } = start({ after: () => last });
  newest().fire("open");
  last = 9;
  newest().fire("close", { code: 1006 });
  assert.equal(FakeSocket.made.length, 1);
  mock.timers.tick(499);
  assert.equal(FakeSocket.made.length, 1);
  mock.timers.tick(1);
  assert.equal(FakeSocket.made.length, 2);
  assert.match(newest().url, /after=9$/);
  assert.deepEqual(
    states.map(([state]) => state),
    ["connecting", "open", "waiting", "connecting"],
  );
});

test("only a message resets the wait: a server that accepts and drops is not hammered", () => {
  const { states } = start();
  for (let i = 0; i < 3; i += 1) {
    newest().fire("open");
    newest().fire("close", { code: 1011 });
    mock.timers.tick(15000);
  }
  newest().receive({ kind: "status" });
  newest().fire("close", { code: 1006 });
  const waits = states.filter(([state]) => state === "waiting").map(([, { delay }]) => delay);
  assert.deepEqual(waits, [500, 1000, 2000, 500]);
});

test("a gap has the socket opened again, and the old one is not listened to any more", () => {
  const got = [];
  start({
    onMessage: (message) => {
      got.push(message.n);
      return message.n === 1 ? "gap" : "ok";
    },
  });
  const first = newest();
  first.receive({ n: 1 });
  assert.equal(first.closed, 1000);
  first.receive({ n: 2 });
  mock.timers.tick(500);
  newest().receive({ n: 3 });
  assert.deepEqual(got, [1, 3]);
});

test("signed out, forbidden or gone: it says so and stays closed", () => {
  for (const code of [4401, 4403, 4404]) {
    const { states, link } = start();
    const made = FakeSocket.made.length;
    newest().fire("close", { code });
    mock.timers.tick(60_000);
    link.retry();
    assert.equal(FakeSocket.made.length, made);
    assert.deepEqual(states.at(-1), ["closed", { code }]);
  }
});

test("retry opens at once while it waits, and leaves an open socket alone", () => {
  const { link } = start();
  link.retry();
  assert.equal(FakeSocket.made.length, 1);
  newest().fire("close", { code: 1006 });
  link.retry();
  assert.equal(FakeSocket.made.length, 2);
  mock.timers.tick(60_000);
  assert.equal(FakeSocket.made.length, 2);
});
