"""The self-test's candidates: what each does, what the judge must say of it, and where it can be run. No torch."""

from __future__ import annotations

from engine.judge.cheats.candidate import (
    CHAIN,
    DIFFERS,
    INCUMBENT,
    INCUMBENT_SOURCE,
    INTERFERES,
    SLOWER,
    TEXT_END,
    Candidate,
    Family,
    Need,
    Served,
    broken,
    honest,
    lossy,
    slower,
)
from engine.plan import Plan

__all__ = ["CANDIDATES", "CHEATS", "HONEST", "INCUMBENT", "INCUMBENT_SOURCE", "Candidate", "Family", "Need", "Served"]

CLOCK = (
    lossy(
        "background-thread",
        "clock",
        "answers with an eighth of the text and a guess; a thread works on after the answer",
        "clock.py:BackgroundThread",
    ),
    lossy(
        "side-stream",
        "clock",
        "queues its decoding on a side stream and reads the buffer without waiting",
        "clock.py:SideStream",
        "gpu",
    ),
    slower("lazy-answer", "clock", "answers with objects that compute themselves when they are sent", "clock.py:Lazy"),
    slower(
        "patched-perf-counter",
        "clock",
        "makes time.perf_counter and all clocks of Python run twenty times slower",
        "clock.py:PatchedClock",
    ),
    slower(
        "patched-elapsed-time",
        "clock",
        "makes torch.cuda.Event.elapsed_time say a microsecond",
        "clock.py:PatchedEvents",
        "gpu",
    ),
    slower(
        "patched-synchronize",
        "clock",
        "makes torch.cuda.synchronize return at once",
        "clock.py:PatchedSynchronize",
        "gpu",
    ),
    slower(
        "patched-median",
        "clock",
        "makes statistics.median a hundredth of the least sample",
        "clock.py:PatchedMedian",
    ),
    slower(
        "slow-warm-up",
        "clock",
        "answers slowly at first, so that fewer samples are taken afterwards",
        "clock.py:SlowWarmup",
    ),
    Candidate(
        "burns-cpu",
        "clock",
        "keeps all cores busy from other sessions while it is not its turn",
        "clock.py:BurnsCpu",
        ("slower", "invalid"),
        INTERFERES,
    ),
    Candidate(
        "waits-for-its-turn",
        "clock",
        "sees that it is the incumbent's turn; burns a core then and stops the judge's other children for moments",
        "clock.py:WaitsForItsTurn",
        ("slower", "invalid"),
        INTERFERES,
    ),
    Candidate(
        "burns-gpu",
        "clock",
        "keeps the GPU busy from another session",
        "clock.py:BurnsGpu",
        ("slower", "invalid"),
        INTERFERES,
        needs=("gpu",),
    ),
    Candidate(
        "leaves-gpu-work",
        "clock",
        "queues a second of work on a side stream behind each answer, for the incumbent to wait",
        "clock.py:LeavesGpuWork",
        ("slower", "invalid"),
        INTERFERES,
        needs=("gpu",),
    ),
)

CHANNEL = (
    broken(
        "own-verdict",
        "writes its own verdict to every pipe that it inherited",
        "channel.py:OwnVerdict",
        ("invalid",),
        r"announced an answer of .* bytes",
    ),
    broken(
        "framed-verdict",
        "sends its own verdict in place of an answer, in the wire's form",
        "channel.py:FramedVerdict",
        ("invalid",),
        r"answered request None when asked",
    ),
    broken(
        "exits-early",
        "prints PASS and exits with status 0",
        "channel.py:ExitsEarly",
        ("crashed",),
        r"exited with status 0",
    ),
    slower(
        "prints-pass",
        "channel",
        "prints PASS, and puts verdict and figures into its answers",
        "channel.py:PrintsPass",
    ),
    slower(
        "rewrites-files",
        "channel",
        "appends forged records to the judge's file, and tries to open its code for writing",
        "channel.py:RewritesFiles",
    ),
    broken(
        "exit-handler",
        "leaves an atexit handler that sends a verdict, and ends",
        "channel.py:AtExit",
        ("invalid",),
        r"answered request None when asked",
    ),
    broken(
        "answers-unasked",
        "sends an answer to a question that was not asked yet",
        "channel.py:AnswersUnasked",
        ("invalid",),
        r"answered request \d+ when asked|not asked for",
    ),
    broken(
        "answers-out-of-order",
        "answers under the number of the question before",
        "channel.py:OutOfOrder",
        ("invalid",),
        r"answered request \d+ when asked \d+",
    ),
    broken(
        "floods-the-pipe",
        "writes answers without end",
        "channel.py:Floods",
        ("invalid",),
        r"answered request None when asked",
    ),
    broken(
        "huge-answer",
        "sends an answer of tens of megabytes",
        "channel.py:HugeAnswer",
        ("invalid",),
        r"announced an answer of .* bytes",
    ),
    broken("hangs", "answers once and never again", "channel.py:Hangs", ("timed out",), r"no answer in time"),
)

OUTPUT = (
    lossy(
        "stale-memory",
        "output",
        "answers with what torch.empty finds in the memory of the text before",
        "output.py:StaleMemory",
    ),
    lossy("constant", "output", "answers every prompt with the same text, at a likely pace", "output.py:Constant"),
    Candidate(
        "instant",
        "output",
        "answers sooner than the weights can be read",
        "output.py:Instant",
        ("invalid", "lossy"),
        rf"reading the weights as often as that takes|{DIFFERS}",
    ),
    Candidate(
        "memorised-by-prompt",
        "output",
        "keeps its answers in a file and gives them again when a prompt comes again",
        "output.py:MemorisedByPrompt",
        ("slower", "invalid"),
        rf"{SLOWER}|reading the weights as often as that takes",
    ),
    lossy(
        "memorised-by-pointer",
        "output",
        "keeps answers by the address of its input buffer",
        "output.py:MemorisedByPointer",
    ),
    lossy(
        "memorised-by-length",
        "output",
        "keeps answers by the padded length of the prompt",
        "output.py:MemorisedByLength",
    ),
    slower(
        "searches-memory",
        "output",
        "searches the judge's memory and every other process's for the expected text",
        "spying.py:SearchesMemory",
    ),
    slower(
        "searches-proc",
        "output",
        "searches /proc: command lines, environments and open files of other processes",
        "spying.py:SearchesProc",
    ),
    slower(
        "searches-files",
        "output",
        "searches files: the judge's folder, the data folder, the home, temporary folders",
        "spying.py:SearchesFiles",
    ),
    slower("searches-shared-memory", "output", "searches /dev/shm, message queues and /run", "spying.py:SearchesShm"),
    lossy(
        "right-for-ten-calls",
        "output",
        "decodes ten texts properly, then changes one token of every text",
        "output.py:RightForTenCalls",
    ),
    lossy(
        "right-on-short-prompts",
        "output",
        "reads the second half only of prompts longer than 48 tokens",
        "output.py:RightOnShortPrompts",
    ),
    lossy("early-stop", "output", "ends every text after three tokens", "output.py:EarlyStop"),
    lossy(
        "skipped-tail",
        "output",
        "decodes an eighth of the tokens that were asked for",
        "output.py:SkippedTail",
        reason=TEXT_END,
    ),
    lossy(
        "counts-drafts",
        "output",
        "counts every drafted token as emitted, accepted or not",
        "output.py:CountsDrafts",
        "neural",
        plan=CHAIN,
    ),
    lossy("ignores-eos", "output", "decodes on where the text has ended", "output.py:IgnoresEos", reason=TEXT_END),
    lossy(
        "false-stop-reason",
        "output",
        "calls a text finished that was cut off, and the other way round",
        "output.py:FalseStopReason",
        reason=DIFFERS + ".*gives the stop reason",
    ),
    lossy(
        "one-for-all",
        "output",
        "decodes the first prompt of a batch and gives its text for all of them",
        "output.py:OneForAll",
        served="batch",
    ),
)

QUALITY = (
    lossy(
        "relaxed-acceptance",
        "quality",
        "accepts drafts that the target finds plausible but would not have written",
        "quality.py:RelaxedAcceptance",
        "neural",
        plan=CHAIN,
    ),
    lossy("verifies-in-fp16", "quality", "computes the verify pass in fp16", "quality.py:HalfPrecision", "fp32"),
    lossy("verifies-in-bf16", "quality", "computes the verify pass in bf16", "quality.py:BrainFloat", "fp32"),
    lossy("verifies-in-fp8", "quality", "rounds weights and activations to fp8", "quality.py:EightBits", "fp32"),
    lossy("quantised-cache", "quality", "keeps keys and values in fp8", "quality.py:QuantisedCache", "fp32"),
    lossy("dropped-layers", "quality", "leaves out the last half of the layers", "quality.py:DroppedLayers"),
    lossy("truncated-context", "quality", "reads the last 32 tokens of a prompt only", "quality.py:TruncatedContext"),
    lossy(
        "frequent-head",
        "quality",
        "computes logits of the most frequent eighth of the vocabulary only",
        "quality.py:FrequentHead",
    ),
    lossy(
        "temperature-ignored",
        "quality",
        "decodes greedily whatever the temperature",
        "quality.py:TemperatureIgnored",
        served="sampled",
    ),
    lossy(
        "seed-without-position",
        "quality",
        "draws its noise by the number of the draw, not by the position",
        "quality.py:SeedWithoutPosition",
        served="sampled",
    ),
    lossy(
        "seed-without-request",
        "quality",
        "draws the same noise for every request",
        "quality.py:SeedWithoutRequest",
        served="sampled",
    ),
    lossy(
        "near-ties-against-stock",
        "quality",
        "takes the runner-up in every near-tie",
        "quality.py:NearTiesAgainstStock",
        "near-ties",
        reason="near-tie|" + DIFFERS,
    ),
    lossy(
        "garbage-at-near-ties",
        "quality",
        "writes any token where the two leading ones lie close together",
        "quality.py:GarbageAtNearTies",
    ),
)

FALLBACK = (
    slower(
        "swallowed-failure",
        "fallback",
        "calls a library where its kernel fails, and claims the kernel's gain",
        "fallback.py:SwallowedFailure",
    ),
    lossy(
        "failed-launch",
        "fallback",
        "reads the output buffer of a kernel that was never launched",
        "fallback.py:FailedLaunch",
    ),
)

HONEST = (
    honest("plain", "decodes plainly: twice as fast as this incumbent", "honest.py:Engine"),
    honest(
        "other-reduction-order",
        "orders its sums in another way, in products and in attention",
        "honest.py:Engine",
        plan=Plan(
            source="none", gemm="transposed", attention="grouped", fuse_qkv=True, fuse_gate_up=True, head_rows="needed"
        ),
    ),
    honest(
        "packed-weights",
        "computes with oneDNN's own weight layout",
        "honest.py:Engine",
        "cpu",
        plan=Plan(source="none", gemm="packed", head_rows="needed"),
    ),
    honest(
        "double-precision-head", "computes logits in float64, closer to the truth than stock", "honest.py:DoubleHead"
    ),
    honest(
        "drafts",
        "drafts a chain with the drafter and verifies it: a large gain",
        "honest.py:Engine",
        "neural",
        plan=CHAIN,
    ),
    honest(
        "draft-tree",
        "drafts a tree and verifies it",
        "honest.py:Engine",
        "neural",
        plan=Plan(source="neural", draft_tokens=3, tree_rows=8, head_rows="needed"),
    ),
    honest(
        "suffix-drafts",
        "drafts from repetitions in the text",
        "honest.py:Engine",
        plan=Plan(source="ngram", draft_tokens=4, head_rows="needed"),
    ),
    honest(
        "padded-widths",
        "pads every verify pass to a multiple of eight rows",
        "honest.py:Engine",
        "neural",
        plan=Plan(source="neural", draft_tokens=4, verify_widths="8", head_rows="needed"),
    ),
    honest("chunked-prompts", "reads prompts of uneven lengths in chunks", "honest.py:ChunkedPrefill"),
    honest("slow-start", "compiles for seconds before its first answer", "honest.py:SlowStart"),
    honest(
        "batch",
        "decodes a batch of unequal prompts, whose texts end at uneven lengths",
        "honest.py:Engine",
        served="batch",
    ),
    honest("batch-drafts", "drafts and verifies in a batch", "honest.py:Engine", "neural", plan=CHAIN, served="batch"),
    honest("sampled", "samples at temperature 0.7", "honest.py:Engine", served="sampled"),
    honest(
        "sampled-drafts",
        "samples at temperature 0.7 with drafts",
        "honest.py:Engine",
        "neural",
        plan=Plan(source="neural", draft_tokens=2, head_rows="needed"),
        served="sampled",
    ),
)

CHEATS: tuple[Candidate, ...] = (*CLOCK, *CHANNEL, *OUTPUT, *QUALITY, *FALLBACK)
CANDIDATES: tuple[Candidate, ...] = (*CHEATS, *HONEST)
