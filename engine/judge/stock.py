"""Stock, unmodified, behind the judge's protocol: transformers' `generate` and the released `dflash` package.

Eager (nothing compiled), in the deployment's dtype, with transformers' default attention for the model; `describe` says
which. Only a counter of the target's forward passes is hooked on, to explain the accept length.

Greedy, unless the question asks for sampling. Plain decoding then goes on as before over logits that a LogitsProcessor,
the public extension point of `generate`, has rounded to the model's dtype and given the question's noise. The released
speculative implementations draw by their own sampling: such a text is timed, and there is nothing to compare it with.

Several prompts of one question are one batch of plain decoding, padded on the left. The speculative implementations
take one request at a time.

Imports torch and transformers in the child only.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engine.deployment import Deployment
from engine.judge.backends import Backend, NotOffered, stop_reason
from engine.plan import Plan
from engine.sample import Sampler
from engine.sampling import Sampling
from engine.weights import open_checkpoint

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LOOKUP_TOKENS = 10
"""transformers has no default for `prompt_lookup_num_tokens`; its documentation's example uses 10."""
SCORED_ROWS = 64
"""Rows whose noise is in memory at once while a text is scored: float64, the whole vocabulary."""
ONE_AT_A_TIME = "prompts of one question are decoded one after another: the implementation takes one request"
OWN_SAMPLING = "by the implementation's own sampling: timed only, its text is not compared"


def load_model(ref: str, deployment: Deployment) -> Any:
    """A transformers causal LM with plain settings, in eval mode on the deployment's device. The baselines of
    one process share it."""
    return _load(open_checkpoint(ref).path, DTYPES[deployment.dtype], deployment.platform)


@functools.cache
def _load(path: Path, dtype: torch.dtype, platform: str) -> Any:
    from transformers import AutoModelForCausalLM, GenerationConfig

    if path.suffix == ".gguf":
        model = from_gguf(path, dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(str(path), dtype=dtype)
    # A checkpoint may ask for sampling or a repetition penalty; what is judged is the target's own distribution.
    model.generation_config = GenerationConfig()
    return model.to(platform).eval()


def from_gguf(path: Path, dtype: torch.dtype) -> Any:
    """Transformers' own model class with the weights of a GGUF file.

    The file is read by `engine.weights` (the same `gguf.dequantize`): transformers' reader also parses the
    vocabulary, token by token, which takes 17 s for the demo target against 2 s. That both give the same parameters
    bit for bit is a test.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    checkpoint = open_checkpoint(str(path))
    config, rope = checkpoint.config, checkpoint.config.rope
    if rope.kind != "default":
        return AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=dtype)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(
                config.architecture,
                vocab_size=config.vocab_size,
                hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size,
                num_hidden_layers=config.num_layers,
                num_attention_heads=config.num_heads,
                num_key_value_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                max_position_embeddings=config.max_positions,
                rms_norm_eps=config.rms_norm_eps,
                rope_parameters={"rope_type": "default", "rope_theta": rope.theta},
                tie_word_embeddings=config.tie_embeddings,
            ),
            dtype=dtype,
        )
    weights = {name: checkpoint.tensor(name).to(dtype) for name in checkpoint.names()}
    missing, unexpected = model.load_state_dict(weights, assign=True, strict=False)
    tied = {"lm_head.weight"} if config.tie_embeddings else set()
    if unexpected or set(missing) - tied:
        raise ValueError(f"transformers' {config.architecture} model wants other tensors: {missing}, {unexpected}")
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # its table is no weight: made on a real device
    return model


class TransformersBackend(NotOffered):
    """`generate` of transformers, and scores of texts."""

    how = "generate"
    batch = "prompts of one question are one batch, padded on the left"
    sampling = "greedy choice over logits with the question's noise"

    def __init__(self, deployment: Deployment) -> None:
        import transformers

        self._model = load_model(deployment.target, deployment)
        attention = self._model.config._attn_implementation
        self._implementation = f"transformers {transformers.__version__} {self.how} (eager, {attention} attention)"

    def describe(self) -> dict[str, Any]:
        return described(self._implementation, self._model, self.batch, self.sampling)

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        stop_ids: tuple[int, ...],
        sampling: Sampling | None = None,
    ) -> list[dict[str, Any]]:
        longest = max(map(len, prompts))
        padding = [longest - len(prompt) for prompt in prompts]
        fill = stop_ids[0] if stop_ids else 0  # any id will do: the attention mask hides it
        ids = self._tensor([[fill] * pad + list(prompt) for pad, prompt in zip(padding, prompts, strict=True)])
        mask = self._tensor([[0] * pad + [1] * (longest - pad) for pad in padding])
        options: dict[str, Any] = {"do_sample": False}
        if sampling is not None:
            options["logits_processor"] = [NoiseProcessor(self._sampler(sampling), padding)]
        output = self._decode(ids, mask, max_new_tokens, stop_ids, options)
        texts = [cut(row, stop_ids) for row in output[:, longest:].tolist()]
        # One pass a token; prefill, which is no step, gave the first.
        return [answer(text, stop_ids, len(text) - 1, len(text) - 1) for text in texts]

    def _decode(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor,
        max_new_tokens: int,
        stop_ids: tuple[int, ...],
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Prompts and texts [B, T]; rows that ended before the longest are filled up behind their end."""
        output: torch.Tensor = self._model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            eos_token_id=list(stop_ids) or None,
            pad_token_id=stop_ids[0] if stop_ids else None,
            **options,
        )
        return output

    @torch.inference_mode()
    def score(
        self, prompt: Sequence[int], text: Sequence[int], width: int, sampling: Sampling | None = None
    ) -> dict[str, Any]:
        """Logits of every prefix of `text` (itself included), from one pass over prompt and text, or from the
        prompt and then `width` rows at a time over the cache, as decoding at that width computes them."""
        rows = len(text) + 1
        if width == 0:
            logits = self._model(self._tensor([[*prompt, *text]]), logits_to_keep=rows).logits[0]
        else:
            out = self._model(self._tensor([prompt]), logits_to_keep=1, use_cache=True)
            parts = [out.logits[0]]
            for start in range(0, len(text), width):
                chunk = self._tensor([text[start : start + width]])
                out = self._model(chunk, past_key_values=out.past_key_values, use_cache=True)
                parts.append(out.logits[0])
            logits = torch.cat(parts)
        if sampling is None:
            return score_columns(logits, text)
        return score_columns(logits, text, (self._sampler(sampling), len(prompt)))

    def _sampler(self, sampling: Sampling) -> Sampler:
        model = self._model
        return Sampler(sampling, model.config.vocab_size, model.device, model.dtype)

    def _tensor(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        return torch.tensor([list(row) for row in rows], dtype=torch.long, device=self._model.device)


class NoiseProcessor:
    """What `generate` calls before it takes the largest score: logits in its dtype + temperature * noise.

    Row i is prompt i, with `padding[i]` ids on its left that are not part of its text: they do not count for the
    position of the token that is chosen.
    """

    def __init__(self, sampler: Sampler, padding: Sequence[int]) -> None:
        self._sampler = sampler
        self._padding = padding

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        positions = [input_ids.shape[1] - pad for pad in self._padding]
        return self._sampler.perturbed(scores, range(len(positions)), positions)


class AssistedBackend(TransformersBackend):
    """One of the assisted forms of transformers' `generate`, with its `options`."""

    batch = ONE_AT_A_TIME
    sampling = OWN_SAMPLING

    def __init__(self, deployment: Deployment, how: str, options: dict[str, Any]) -> None:
        self.how = how + own_sampling_note(deployment)
        super().__init__(deployment)
        self._options = options
        self._passes = count_passes(self._model)

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        stop_ids: tuple[int, ...],
        sampling: Sampling | None = None,
    ) -> list[dict[str, Any]]:
        results = []
        for number, prompt in enumerate(prompts):
            ids = self._tensor([prompt])
            options = {**self._options, "do_sample": sampling is not None}
            if sampling is not None:
                seed_own_sampling(sampling, number)
                # top_k: transformers' own default would leave out all but 50 ids.
                options |= {"temperature": sampling.temperature, "top_k": 0, "top_p": 1.0}
            self._passes.count = 0
            output = self._decode(ids, torch.ones_like(ids), max_new_tokens, stop_ids, options)
            text = output[0, len(prompt) :].tolist()
            results.append(answer(text, stop_ids, self._passes.count, len(text)))  # prefill verifies drafts, too
        return results


def score_columns(
    logits: torch.Tensor, text: Sequence[int], noise: tuple[Sampler, int] | None = None
) -> dict[str, Any]:
    """`protocol.Scores` of logits [len(text) + 1, V] in the model's dtype; of equal logits the lowest id wins. `noise`:
    who adds it, and the absolute position of row 0's choice."""
    if noise is None:
        parts = [_columns(logits, text)]
    else:
        sampler, first = noise
        parts = []
        for start in range(0, len(logits), SCORED_ROWS):
            rows = logits[start : start + SCORED_ROWS]
            positions = range(first + start, first + start + len(rows))
            parts.append(_columns(sampler.perturbed(rows, [0] * len(rows), positions), text[start : start + len(rows)]))
    columns: dict[str, list[Any]] = {name: [value for part in parts for value in part[name]] for name in parts[0]}
    following = columns["choice"][len(text)]
    return {**{name: column[: len(text)] for name, column in columns.items()}, "following": following}


def _columns(logits: torch.Tensor, text: Sequence[int]) -> dict[str, list[Any]]:
    """Row by row; a last row without a token has no `token_logit`."""
    choice = logits.argmax(-1)  # the first of equal maxima
    rest = logits.scatter(1, choice[:, None], float("-inf"))
    second = rest.argmax(-1)

    def at(rows: torch.Tensor, ids: torch.Tensor) -> list[float]:
        values: list[float] = rows[: len(ids)].gather(1, ids[:, None])[:, 0].double().tolist()
        return values

    return {
        "choice": choice.tolist(),
        "choice_logit": at(logits, choice),
        "token_logit": at(logits, torch.tensor(list(text), dtype=torch.long, device=logits.device)),
        "second": second.tolist(),
        "second_logit": at(logits, second),
    }


class DFlashBackend(NotOffered):
    """`spec_generate` of the released `dflash` package, over a transformers target."""

    def __init__(self, deployment: Deployment) -> None:
        from importlib.metadata import version

        import dflash.model as released
        import transformers

        folder = open_checkpoint(deployment.drafter).path
        self._target = load_model(deployment.target, deployment)
        drafter = released.DFlashDraftModel.from_pretrained(str(folder), dtype=DTYPES[deployment.dtype])
        self._drafter = drafter.to(deployment.platform).eval()
        self._passes = count_passes(self._target)
        self._implementation = (
            f"dflash {version('dflash')} spec_generate (transformers {transformers.__version__})"
            f"{own_sampling_note(deployment)}"
        )

    def describe(self) -> dict[str, Any]:
        return described(self._implementation, self._target, ONE_AT_A_TIME, OWN_SAMPLING)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        stop_ids: tuple[int, ...],
        sampling: Sampling | None = None,
    ) -> list[dict[str, Any]]:
        results = []
        for number, prompt in enumerate(prompts):
            ids = torch.tensor([list(prompt)], dtype=torch.long, device=self._target.device)
            options = {}
            if sampling is not None:
                seed_own_sampling(sampling, number)
                options = {"temperature": sampling.temperature}
            self._passes.count = 0
            output = self._drafter.spec_generate(
                target=self._target,
                input_ids=ids,
                max_new_tokens=max_new_tokens,
                stop_token_ids=list(stop_ids),
                **options,
            )
            text = output[0, len(prompt) :].tolist()
            results.append(answer(text, stop_ids, self._passes.count - 1, len(text) - 1))  # prefill gave the first
        return results


class PassCounter:
    """Counts forward passes of a module."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *_: Any) -> None:
        self.count += 1


def count_passes(model: Any) -> PassCounter:
    counter = PassCounter()
    model.register_forward_hook(counter)
    return counter


def cut(ids: list[int], stop_ids: Sequence[int]) -> list[int]:
    """`ids` up to the first stop id, which belongs to the text; behind it a batch has filled the row up."""
    end = next((i for i, token in enumerate(ids) if token in stop_ids), len(ids) - 1)
    return ids[: end + 1]


def answer(ids: list[int], stop_ids: Sequence[int], steps: int, emitted: int) -> dict[str, Any]:
    """The text, and how many of its tokens came from how many verify steps."""
    return {"ids": ids, "stop_reason": stop_reason(ids, stop_ids), "steps": steps, "emitted": emitted}


def described(implementation: str, model: Any, batch: str, sampling: str) -> dict[str, Any]:
    """What a stock backend says of itself: `batch` and `sampling` are sentences on how it takes such questions."""
    return {
        "implementation": implementation,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "dtype": str(model.dtype),
        "batch": batch,
        "sampling": sampling,
    }


def own_sampling_note(deployment: Deployment) -> str:
    """What the name of a released speculative implementation says at a temperature above 0."""
    temperature = deployment.regime.temperature
    return f", its own sampling at temperature {temperature:g}, timed only" if temperature else ""


def seed_own_sampling(sampling: Sampling, number: int) -> None:
    """Own sampling draws from torch's global generator: the same question gets the same text."""
    torch.manual_seed(sampling.seed ^ (sampling.requests[number] << 32))


def build_autoregressive(deployment: Deployment, plan: Plan | None, threads: int) -> Backend:
    torch.set_num_threads(threads)
    return TransformersBackend(deployment)


def build_lookup(deployment: Deployment, plan: Plan | None, threads: int) -> Backend:
    torch.set_num_threads(threads)
    return AssistedBackend(deployment, "prompt lookup", {"prompt_lookup_num_tokens": LOOKUP_TOKENS})


def build_assisted(deployment: Deployment, plan: Plan | None, threads: int) -> Backend:
    torch.set_num_threads(threads)
    assistant = load_model(deployment.drafter, deployment)
    return AssistedBackend(deployment, "assisted generation", {"assistant_model": assistant})


def build_dflash(deployment: Deployment, plan: Plan | None, threads: int) -> Backend:
    torch.set_num_threads(threads)
    return DFlashBackend(deployment)
