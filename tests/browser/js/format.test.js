import assert from "node:assert/strict";
import { test } from "node:test";

import * as f from "../../../static/js/format.js";

const spaces = (text) => text.replaceAll("\u00a0", " ");

test("numbers keep about three significant digits and group thousands", () => {
  const cases = [
    [0.0613, "0.0613"],
    [0.00000123456, "0.000001"],
    [1.234, "1.23"],
    [12.34, "12.3"],
    [123.4, "123"],
    [61440, "61,440"],
    [0, "0"],
    [-0.4, "−0.400"],
  ];
  for (const [value, text] of cases) assert.equal(f.significant(value), text);
});

test("what is no number is a dash, never NaN or null", () => {
  for (const write of [
    f.number,
    f.significant,
    f.ratio,
    f.change,
    f.percent,
    f.milliseconds,
    f.tokensPerSecond,
    f.duration,
    f.bytes,
    f.clock,
  ]) {
    for (const value of [null, undefined, NaN, Infinity]) assert.equal(write(value), f.NONE);
  }
  assert.equal(f.interval(null, 2), "");
});

test("a ratio becomes a signed change, and what rounds to nothing has no sign", () => {
  assert.equal(spaces(f.change(1.0313)), "+3.1 %");
  assert.equal(spaces(f.change(0.996)), "−0.4 %");
  assert.equal(spaces(f.change(1.0004)), "0.0 %");
  assert.equal(spaces(f.change(0.9996)), "0.0 %");
});

test("durations carry over from unit to unit", () => {
  const cases = [
    [0.4, "0 s"],
    [59.4, "59 s"],
    [59.6, "1 min 00 s"],
    [425, "7 min 05 s"],
    [3599.7, "1 h 00 min"],
    [4320, "1 h 12 min"],
    [-3, "0 s"],
  ];
  for (const [seconds, text] of cases) assert.equal(spaces(f.duration(seconds)), text);
});

test("bytes have decimal units", () => {
  const cases = [
    [999, "999 B"],
    [48213, "48.2 kB"],
    [1.5e9, "1.50 GB"],
  ];
  for (const [size, text] of cases) assert.equal(spaces(f.bytes(size)), text);
});

test("CSV quotes what needs it and defuses formulas in text, not in numbers", () => {
  const text = f.csv(
    ["a", "b"],
    [
      ['say "hi", now', -0.4],
      ["=1+1", null],
      ["line\nbreak", undefined],
      ["@x", true],
    ],
  );
  assert.equal(text, 'a,b\r\n"say ""hi"", now",-0.4\r\n\'=1+1,\r\n"line\nbreak",\r\n\'@x,true\r\n');
});

test("an unknown verdict or status is shown as its own word", () => {
  assert.equal(f.verdict("melted").word, "melted");
  assert.equal(f.status("asleep").word, "asleep");
  assert.equal(f.verdict(null).word, "Unknown");
});

test("file names hold nothing that a file system minds", () => {
  assert.equal(f.fileName("search-42", "Where/the time: goes"), "search-42-where-the-time-goes");
});
