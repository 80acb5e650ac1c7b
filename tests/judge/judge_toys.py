"""A toy language model and decoders of it, honest and not, for real child processes that start in a moment.

The model's logits are a fixed pseudo-random function of the last tokens. `stock` decodes it plainly and scores;
every other function here is a candidate. Loaded by the child as "judge_toys.py:NAME".
"""

from __future__ import annotations

import os
import random
import signal
import struct
import subprocess
import sys
import time
import zlib

VOCAB = 40
EOS = 0
NOISE = 1e-6  # of a logit, by how many rows are computed at once
STOCK_S, FAST_S, SLOW_S = 0.002, 0.001, 0.004  # seconds per token


def logits(prefix, width=1):
    key = zlib.crc32(struct.pack(f"{len(prefix[-4:])}i", *prefix[-4:]))
    rng = random.Random(key)
    values = [rng.gauss(0.0, 2.0) for _ in range(VOCAB)]
    values[EOS] -= 1.0
    wobble = random.Random(key ^ width)
    return [value + NOISE * wobble.uniform(-1, 1) for value in values]


def best(prefix, width=1):
    row = logits(prefix, width)
    return row.index(max(row))


def greedy(prompt, limit, stop_ids, choose=best):
    ids = []
    while len(ids) < limit:
        ids.append(choose([*prompt, *ids]))
        if ids[-1] in stop_ids:
            break
    return ids


def reason(ids, stop_ids):
    return "eos" if ids[-1] in stop_ids else "length"


class Toy:
    """Decodes with `text(prompt, limit, stop_ids)` at `pace` seconds a token."""

    def __init__(self, pace=STOCK_S, text=greedy, name="toy"):
        self.pace, self.text, self.name, self.calls = pace, text, name, 0

    def describe(self):
        return {"implementation": self.name, "environment": sorted(os.environ), "pid": os.getpid()}

    def generate(self, prompts, max_new_tokens, stop_ids):
        results = []
        for prompt in prompts:
            self.calls += 1
            start = time.perf_counter()
            ids = self.text(prompt, max_new_tokens, stop_ids)
            pause = self.pace * len(ids) - (time.perf_counter() - start)
            time.sleep(max(0.0, pause))
            results.append({"ids": ids, "stop_reason": reason(ids, stop_ids), "steps": len(ids), "emitted": len(ids)})
        return results

    def score(self, prompt, text, width):
        rows = [logits([*prompt, *text[:i]], width or 99) for i in range(len(text) + 1)]
        choice = [row.index(max(row)) for row in rows]
        second = [
            max((x for x in range(VOCAB) if x != c), key=row.__getitem__) for row, c in zip(rows, choice, strict=False)
        ]
        n = len(text)
        return {
            "choice": choice[:n],
            "choice_logit": [rows[i][choice[i]] for i in range(n)],
            "token_logit": [rows[i][text[i]] for i in range(n)],
            "second": second[:n],
            "second_logit": [rows[i][second[i]] for i in range(n)],
            "following": choice[n],
        }

    def profile(self, prompts, max_new_tokens, stop_ids):
        raise NotImplementedError


def stock(deployment, plan, threads):
    return Toy(name="toy stock")


def speculative(deployment, plan, threads):
    return Toy(pace=STOCK_S * 1.5, name="toy stock speculative")


# Honest candidates


def honest(deployment, plan, threads):
    """Faster with every draft token."""
    return Toy(pace=STOCK_S * 2 / (1 + plan.draft_tokens) if plan.source != "none" else STOCK_S, name="toy engine")


def other_width(deployment, plan, threads):
    """The same function computed eight rows at a time: differs from stock by near-ties at most."""
    return Toy(FAST_S, lambda p, n, s: greedy(p, n, s, lambda prefix: best(prefix, 8)))


def slow_start(deployment, plan, threads):
    toy = Toy(FAST_S)
    first = toy.text

    def text(prompt, limit, stop_ids):
        if toy.calls == 1:
            time.sleep(0.6)
        return first(prompt, limit, stop_ids)

    toy.text = text
    return toy


# Candidates that are not


def import_error(deployment, plan, threads):
    import a_module_that_is_nowhere  # noqa: F401


def out_of_memory(deployment, plan, threads):
    print("allocating a lot", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def dies_when_asked(deployment, plan, threads):
    def text(prompt, limit, stop_ids):
        print("about to fail\x1b[31m", file=sys.stderr, flush=True)
        os._exit(3)

    return Toy(text=text)


def raises_when_asked(deployment, plan, threads):
    return Toy(text=lambda p, n, s: 1 // 0)


def exits_zero(deployment, plan, threads):
    def text(prompt, limit, stop_ids):
        print("PASS 10.0x lossless", flush=True)
        os._exit(0)

    return Toy(text=text)


def hangs(deployment, plan, threads):
    def text(prompt, limit, stop_ids):
        while True:
            signal.pause()

    return Toy(text=text)


def _answers_pipe():
    return int(sys.argv[sys.argv.index("--answers") + 1])


def _frame(body):
    return struct.pack(">I", len(body)) + body


def _raw(data):
    def build(deployment, plan, threads):
        def text(prompt, limit, stop_ids):
            os.write(_answers_pipe(), data)
            return greedy(prompt, limit, stop_ids)

        return Toy(FAST_S, text)

    return build


not_json = _raw(_frame(b"PASS"))
not_an_object = _raw(_frame(b"[1, 2]"))
not_a_number = _raw(_frame(b'{"request": 1, "ok": {"texts": [NaN]}}'))
announces_gigabytes = _raw(struct.pack(">I", 0xFFFFFFFF))
wrong_request = _raw(_frame(b'{"request": 1, "ok": {"texts": [{"ids": [1], "stop_reason": "length"}]}}'))
own_verdict = _raw(_frame(b'{"verdict": "accepted", "ratio": 10.0}'))


def answers_ahead(deployment, plan, threads):
    """A second answer right behind the first, for a question that has not been asked."""
    import json
    import threading

    def write(ids):
        text = {"ids": ids, "stop_reason": "length"}
        os.write(_answers_pipe(), _frame(json.dumps({"request": 2, "ok": {"texts": [text]}}).encode()))

    class Ahead(Toy):
        def generate(self, prompts, max_new_tokens, stop_ids):
            results = super().generate(prompts, max_new_tokens, stop_ids)
            threading.Timer(0.0, write, [results[0]["ids"]]).start()
            return results

    return Ahead(FAST_S)


def floods(deployment, plan, threads):
    def text(prompt, limit, stop_ids):
        while True:
            os.write(_answers_pipe(), b"\x00\x00\x00\x02{}" * 1000)

    return Toy(text=text)


def floods_log(deployment, plan, threads):
    """Noise on standard output changes nothing, and does not fill the memory of the judge."""
    print("x" * 3_000_000, flush=True)
    return Toy(FAST_S)


def constant(deployment, plan, threads):
    return Toy(FAST_S, lambda p, n, s: [7] * n)


def skips_tail(deployment, plan, threads):
    return Toy(FAST_S, lambda p, n, s: greedy(p, max(1, n // 2), s))


def ignores_eos(deployment, plan, threads):
    def second_best(prefix):
        row = logits(prefix)
        row[EOS] = -1e9
        return row.index(max(row))

    return Toy(FAST_S, lambda p, n, s: greedy(p, n, s, second_best))


def ends_early(deployment, plan, threads):
    def text(prompt, limit, stop_ids):
        return [*greedy(prompt, 3, stop_ids)[:3], EOS]

    return Toy(FAST_S, text)


def goes_on_after_eos(deployment, plan, threads):
    return Toy(FAST_S, lambda p, n, s: (greedy(p, n, s) + greedy(p, n, ()))[:n])


def false_reason(deployment, plan, threads):
    class False_(Toy):
        def generate(self, prompts, max_new_tokens, stop_ids):
            results = super().generate(prompts, max_new_tokens, stop_ids)
            return [{**r, "stop_reason": "eos" if r["stop_reason"] == "length" else "length"} for r in results]

    return False_(FAST_S)


def too_many(deployment, plan, threads):
    return Toy(FAST_S, lambda p, n, s: [*greedy(p, n, ()), 5])


def no_tokens(deployment, plan, threads):
    class Empty(Toy):
        def generate(self, prompts, max_new_tokens, stop_ids):
            return [{"ids": [], "stop_reason": "length"} for _ in prompts]

    return Empty()


def outside_vocabulary(deployment, plan, threads):
    return Toy(FAST_S, lambda p, n, s: [*greedy(p, n, s)[:-1], VOCAB])


def boolean_ids(deployment, plan, threads):
    return Toy(FAST_S, lambda p, n, s: [True] * n)


def too_few_texts(deployment, plan, threads):
    class Few(Toy):
        def generate(self, prompts, max_new_tokens, stop_ids):
            return []

    return Few()


def right_for_some_calls(deployment, plan, threads):
    toy = Toy(FAST_S)

    def text(prompt, limit, stop_ids):
        ids = greedy(prompt, limit, stop_ids)
        if toy.calls > 4:
            ids[len(ids) // 2] = 1 + ids[len(ids) // 2] % (VOCAB - 1)
        return ids

    toy.text = text
    return toy


def too_fast(deployment, plan, threads):
    return Toy(pace=0.0)


def leaves_a_process(deployment, plan, threads):
    """A grandchild in a session of its own, named in the log."""
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
    print(f"left {process.pid}", flush=True)
    return Toy()


def works_in_background(deployment, plan, threads):
    """A thread that counts without end; the log shows how far it got when asked."""
    import threading

    state = {"count": 0}

    def count():
        while True:
            state["count"] += 1
            time.sleep(0.0005)

    threading.Thread(target=count, daemon=True).start()

    class Counting(Toy):
        def describe(self):
            return {"implementation": "counting", "count": state["count"], "pid": os.getpid()}

    return Counting(pace=0.0)


class Drifting(Toy):
    """Decodes at half its pace from its fifth answer on, until its answer number `until`."""

    def __init__(self, until):
        super().__init__()
        self.until = until

    def generate(self, prompts, max_new_tokens, stop_ids):
        self.pace = 2 * STOCK_S if 4 <= self.calls < self.until else STOCK_S
        return super().generate(prompts, max_new_tokens, stop_ids)


def slowed_for_a_while(deployment, plan, threads):
    return Drifting(until=10)


def slowed_for_good(deployment, plan, threads):
    return Drifting(until=10**9)


def fast_when_asked_again(deployment, plan, threads):
    """Answers a prompt that it has seen six times as fast."""
    toy, seen = Toy(), set()

    def text(prompt, limit, stop_ids):
        toy.pace = STOCK_S / 6 if tuple(prompt) in seen else STOCK_S
        seen.add(tuple(prompt))
        return greedy(prompt, limit, stop_ids)

    toy.text = text
    return toy
