"""Which prompts a trial is judged on. They rotate: two draws share no prompt until every prompt has been used."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from engine.deployment import Deployment, Dtype
from engine.drafters.reference import DrafterKind, open_drafter
from engine.errors import UserError
from engine.prompts import load_prompts
from engine.tokenizer import load_tokenizer
from engine.weights import open_checkpoint

ELEMENT_BYTES: dict[Dtype, int] = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class HiddenPrompt:
    """A prompt as token ids, chat template applied. Only the judge knows its id, category and `text`."""

    id: str
    category: str
    ids: tuple[int, ...]
    text: str = ""


@dataclass(frozen=True)
class Material:
    """What the judge asks and how it reads the answers. `read_bytes` are the weights that every target pass must
    read; `left_out` counts prompts longer than the regime allows; `encode` turns another text into prompt ids."""

    prompts: tuple[HiddenPrompt, ...]
    stop_ids: tuple[int, ...]
    vocab_size: int
    decode: Callable[[list[int]], str]
    read_bytes: int
    drafter_kind: DrafterKind = "none"
    left_out: int = 0
    encode: Callable[[str], tuple[int, ...]] | None = None


def prepare(deployment: Deployment) -> Material:
    """Read prompts, tokenizer and sizes of a deployment; metadata only.

    Raises UserError for a broken prompts file, and where no prompt fits `max_prompt_tokens`.
    """
    regime = deployment.regime
    prompts = load_prompts(regime.prompts)
    checkpoint = open_checkpoint(deployment.target)
    tokenizer = load_tokenizer(checkpoint)

    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.chat([{"role": "user", "content": text}]))

    encoded = [HiddenPrompt(prompt.id, prompt.category, encode(prompt.turns[0]), prompt.turns[0]) for prompt in prompts]
    fitting = tuple(prompt for prompt in encoded if 0 < len(prompt.ids) <= regime.max_prompt_tokens)
    if not fitting:
        shortest = min(len(prompt.ids) for prompt in encoded)
        raise UserError(
            f"No prompt of {regime.prompts} fits {regime.max_prompt_tokens} tokens (the shortest has {shortest}); "
            "raise max_prompt_tokens or use shorter prompts.",
            code="prompts-too-long",
            field="prompts",
        )
    config = checkpoint.config
    # An embedding of its own is looked up row by row; one that is the head, too, is read whole.
    looked_up = 0 if config.tie_embeddings else config.vocab_size * config.hidden_size * ELEMENT_BYTES[deployment.dtype]
    return Material(
        prompts=fitting,
        stop_ids=tokenizer.eos_ids,
        vocab_size=config.vocab_size,
        decode=lambda ids: tokenizer.decode(ids, special=True),
        read_bytes=checkpoint.weight_bytes(deployment.dtype) - looked_up,
        drafter_kind=open_drafter(deployment.drafter).kind,
        left_out=len(encoded) - len(fitting),
        encode=encode,
    )


def draw(
    prompts: Sequence[HiddenPrompt], seed: int | str, number: int, count: int, salt: str = ""
) -> list[HiddenPrompt]:
    """The `count` prompts of draw `number` (from 0): the next ones of an endless, seeded, shuffled sequence.

    The sequence goes through all prompts before it repeats one, and through the categories by turns. Draws of one
    `salt` and one `count` therefore share a prompt only after all have been used. Pure: the same arguments give
    the same prompts on every machine.
    """
    first = number * count
    result: list[HiddenPrompt] = []
    while len(result) < count:
        epoch, offset = divmod(first + len(result), len(prompts))
        shuffled = _spread(prompts, random.Random(f"{seed}:{salt}:{epoch}"))
        result += shuffled[offset : offset + count - len(result)]
    return result


def _spread(prompts: Sequence[HiddenPrompt], rng: random.Random) -> list[HiddenPrompt]:
    """Shuffled within each category, categories by turns."""
    groups: dict[str, list[HiddenPrompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    queues = [groups[name] for name in sorted(groups)]
    rng.shuffle(queues)
    for queue in queues:
        rng.shuffle(queue)
    return list(_by_turns(queues))


def _by_turns(queues: Sequence[Sequence[HiddenPrompt]]) -> Iterator[HiddenPrompt]:
    for index in range(max(map(len, queues))):
        for queue in queues:
            if index < len(queue):
                yield queue[index]
