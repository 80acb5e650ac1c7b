"""Stock, unmodified, behind the judge's protocol: transformers' `generate` and the released `dflash` package.

Greedy, eager (nothing compiled), in the deployment's dtype, with transformers' default attention for the model;
`describe` says which. Only a counter of the target's forward passes is hooked on, to explain the accept length.
Imports torch and transformers on construction, in the child only.
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
from engine.weights import open_checkpoint

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LOOKUP_TOKENS = 10
"""transformers has no default for `prompt_lookup_num_tokens`; its documentation's example uses 10."""


def load_model(ref: str, deployment: Deployment) -> Any:
    """A transformers causal LM with plain greedy settings, in eval mode on the deployment's device. The baselines of
    one process share it."""
    return _load(open_checkpoint(ref).path, DTYPES[deployment.dtype], deployment.platform)


@functools.cache
def _load(path: Path, dtype: torch.dtype, platform: str) -> Any:
    from transformers import AutoModelForCausalLM, GenerationConfig

    if path.suffix == ".gguf":
        model = from_gguf(path, dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(str(path), dtype=dtype)
    # A checkpoint may ask for sampling or a repetition penalty; stock greedy decoding has neither.
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
    """`generate` of transformers; with `options`, one of its assisted forms. Also scores texts."""

    def __init__(self, deployment: Deployment, options: dict[str, Any], how: str, prefill_is_a_step: bool) -> None:
        import transformers

        self._model = load_model(deployment.target, deployment)
        self._options = options
        self._prefill_is_a_step = prefill_is_a_step
        self._passes = count_passes(self._model)
        attention = self._model.config._attn_implementation
        self._implementation = f"transformers {transformers.__version__} {how} (eager, {attention} attention)"

    def describe(self) -> dict[str, Any]:
        return {
            "implementation": self._implementation,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "dtype": str(self._model.dtype),
        }

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_ids: tuple[int, ...]
    ) -> list[dict[str, Any]]:
        results = []
        for prompt in prompts:
            ids = self._tensor(prompt)
            self._passes.count = 0
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=max_new_tokens,
                eos_token_id=list(stop_ids) or None,
                pad_token_id=stop_ids[0] if stop_ids else None,
                **self._options,
            )
            results.append(answer(output[0, ids.shape[1] :].tolist(), stop_ids, self._passes, self._prefill_is_a_step))
        return results

    @torch.inference_mode()
    def score(self, prompt: Sequence[int], text: Sequence[int], width: int) -> dict[str, Any]:
        """Logits of every prefix of `text` (itself included), from one pass over prompt and text, or from the
        prompt and then `width` rows at a time over the cache, as decoding at that width computes them."""
        rows = len(text) + 1
        if width == 0:
            logits = self._model(self._tensor([*prompt, *text]), logits_to_keep=rows).logits[0]
        else:
            out = self._model(self._tensor(prompt), logits_to_keep=1, use_cache=True)
            parts = [out.logits[0]]
            for start in range(0, len(text), width):
                chunk = self._tensor(text[start : start + width])
                out = self._model(chunk, past_key_values=out.past_key_values, use_cache=True)
                parts.append(out.logits[0])
            logits = torch.cat(parts)
        return score_columns(logits, text)

    def _tensor(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor([list(ids)], dtype=torch.long, device=self._model.device)


def score_columns(logits: torch.Tensor, text: Sequence[int]) -> dict[str, Any]:
    """`protocol.Scores` of logits [len(text) + 1, V] in the model's dtype; of equal logits the lowest id wins."""
    choice = logits.argmax(-1)  # the first of equal maxima
    best = logits.gather(1, choice[:, None])[:, 0]
    rest = logits.scatter(1, choice[:, None], float("-inf"))
    second = rest.argmax(-1)
    runner_up = rest.gather(1, second[:, None])[:, 0]
    n = len(text)
    own = logits[:n].gather(1, torch.tensor(list(text), dtype=torch.long, device=logits.device)[:, None])[:, 0]
    return {
        "choice": choice[:n].tolist(),
        "choice_logit": best[:n].float().tolist(),
        "token_logit": own.float().tolist(),
        "second": second[:n].tolist(),
        "second_logit": runner_up[:n].float().tolist(),
        "following": int(choice[n]),
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
        self._implementation = f"dflash {version('dflash')} spec_generate (transformers {transformers.__version__})"

    def describe(self) -> dict[str, Any]:
        return {
            "implementation": self._implementation,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "dtype": str(self._target.dtype),
        }

    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_ids: tuple[int, ...]
    ) -> list[dict[str, Any]]:
        results = []
        for prompt in prompts:
            ids = torch.tensor([list(prompt)], dtype=torch.long, device=self._target.device)
            self._passes.count = 0
            output = self._drafter.spec_generate(
                target=self._target, input_ids=ids, max_new_tokens=max_new_tokens, stop_token_ids=list(stop_ids)
            )
            results.append(answer(output[0, ids.shape[1] :].tolist(), stop_ids, self._passes, False))
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


def answer(ids: list[int], stop_ids: Sequence[int], passes: PassCounter, prefill_is_a_step: bool) -> dict[str, Any]:
    """The text, and how many of its tokens came from how many verify steps. Where prefill is a pass of its own,
    it emitted the first token and is no step."""
    apart = 0 if prefill_is_a_step else 1
    return {
        "ids": ids,
        "stop_reason": stop_reason(ids, stop_ids),
        "steps": passes.count - apart,
        "emitted": len(ids) - apart,
    }


def build_autoregressive(deployment: Deployment, plan: Plan | None, threads: int) -> Backend:
    torch.set_num_threads(threads)
    return TransformersBackend(deployment, {}, "generate", prefill_is_a_step=False)


def build_lookup(deployment: Deployment, plan: Plan | None, threads: int) -> Backend:
    torch.set_num_threads(threads)
    options = {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
    return TransformersBackend(deployment, options, "prompt lookup", prefill_is_a_step=True)


def build_assisted(deployment: Deployment, plan: Plan | None, threads: int) -> Backend:
    torch.set_num_threads(threads)
    assistant = load_model(deployment.drafter, deployment)
    return TransformersBackend(
        deployment, {"assistant_model": assistant}, "assisted generation", prefill_is_a_step=True
    )


def build_dflash(deployment: Deployment, plan: Plan | None, threads: int) -> Backend:
    torch.set_num_threads(threads)
    return DFlashBackend(deployment)
