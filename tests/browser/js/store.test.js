import assert from "node:assert/strict";
import { test } from "node:test";

import { createStore } from "../../../static/js/store.js";

const event = (seq) => ({ seq, time: seq, type: "note", data: { text: String(seq) } });
const range = (from, to) => Array.from({ length: to - from + 1 }, (_, i) => event(from + i));
const seqs = (store) => store.state.events.map((e) => e.seq);

test("events are kept once and in order, whatever overlaps or comes twice", () => {
  const store = createStore({ seq: 3 }, range(1, 3));
  assert.equal(store.update({ events: [event(5), event(4), event(3)], view: { seq: 5 } }), "ok");
  assert.equal(store.update({ events: range(2, 7), view: { seq: 7 } }), "ok");
  assert.deepEqual(seqs(store), [1, 2, 3, 4, 5, 6, 7]);
  assert.equal(store.state.lastSeq, 7);
});

test("a gap is reported and nothing behind it is taken, so that it can be asked for again", () => {
  const store = createStore({ seq: 2 }, range(1, 2));
  assert.equal(store.update({ events: [event(3), event(5)], view: { seq: 5 } }), "gap");
  assert.deepEqual(seqs(store), [1, 2, 3]);
  assert.equal(store.state.lastSeq, 3);
  assert.equal(store.update({ events: range(4, 5), view: { seq: 5 } }), "ok");
  assert.deepEqual(seqs(store), [1, 2, 3, 4, 5]);
});

test("the newest view wins; an older one that comes late is dropped", () => {
  const store = createStore({ seq: 1, round: 0 }, range(1, 1));
  store.update({ events: [], view: { seq: 4, round: 2 } });
  store.update({ events: [], view: { seq: 3, round: 1 } });
  assert.equal(store.state.view.round, 2);
});

test("random deliveries of random slices end in the same log", () => {
  for (let run = 0; run < 50; run += 1) {
    const total = 5 + Math.floor(Math.random() * 40);
    const store = createStore({ seq: 0 }, []);
    for (let tries = 0; store.state.lastSeq < total && tries < 10_000; tries += 1) {
      const from = 1 + Math.floor(Math.random() * total);
      store.update({ events: range(from, Math.min(total, from + Math.floor(Math.random() * 6))) });
    }
    assert.deepEqual(
      seqs(store),
      range(1, total).map((e) => e.seq),
    );
  }
});

test("listeners hear what changed, and only when something did", () => {
  const store = createStore({ seq: 1 }, range(1, 1));
  const heard = [];
  const stop = store.subscribe((_, change) => heard.push(change));
  store.setStatus({ connection: "open" });
  store.setStatus({ connection: "open" });
  store.update({ events: [event(2)], view: { seq: 2 } });
  store.update({ events: [event(2)] });
  stop();
  store.setStatus({ workerOnline: false });
  assert.deepEqual(heard, [{ status: ["connection"] }, { events: [event(2)], view: true }]);
});

test("a long log drops its oldest lines, and goes on from the newest", () => {
  const store = createStore({ seq: 0 }, [], { limit: 10 });
  store.update({ events: range(1, 25) });
  assert.deepEqual(
    seqs(store),
    range(16, 25).map((e) => e.seq),
  );
  assert.equal(store.state.lastSeq, 25);
});
