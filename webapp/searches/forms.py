"""The form that launches a search. It asks; `services.create_search` decides."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib.auth.models import User

from engine.deployment import DEMO_DRAFTER, DEMO_TARGET, NO_DRAFTER, SHIPPED_PROMPTS, Deployment, Regime
from engine.errors import UserError
from engine.sampling import MAX_TEMPERATURE
from engine.search.events import Budget
from webapp.searches import services
from webapp.searches.models import Search

FIELD_OF = {
    "target": "target",
    "drafter": "drafter",
    "prompts": "prompts",
    "platform": "platform",
    "dtype": "dtype",
    "regime": "max_new_tokens",
    "max_prompt_tokens": "max_prompt_tokens",
    "max_new_tokens": "max_new_tokens",
    "seconds": "budget_seconds",
    "trials": "budget_trials",
    "seed": "seed",
}
"""Where the form shows a UserError, by the error's field; any other is shown above the form."""


class NewSearch(forms.Form):
    """Fields in the order of the page. `launch` stores the search, or adds the one sentence of what is wrong."""

    target = forms.CharField(
        max_length=1024,
        initial=DEMO_TARGET,
        help_text=f"Folder of a Hugging Face checkpoint, a .gguf file, or {DEMO_TARGET}.",
    )
    drafter = forms.CharField(
        max_length=1024,
        initial=DEMO_DRAFTER,
        help_text=f"Folder of a DFlash drafter, a smaller checkpoint with the same tokenizer, {DEMO_DRAFTER}, "
        f"or {NO_DRAFTER} for suffix matches alone.",
    )
    platform = forms.ChoiceField(choices=[("cpu", "CPU"), ("cuda:0", "GPU (CUDA)")])
    dtype = forms.ChoiceField(
        label="Number format",
        choices=[("fp32", "fp32"), ("bf16", "bf16")],
        help_text="The model's own numbers; a search never changes them.",
    )
    max_prompt_tokens = forms.IntegerField(label="Longest prompt", min_value=1, initial=Regime().max_prompt_tokens)
    max_new_tokens = forms.IntegerField(label="New tokens", min_value=1, initial=Regime().max_new_tokens)
    temperature = forms.FloatField(
        min_value=0,
        max_value=MAX_TEMPERATURE,
        initial=Regime().temperature,
        help_text=f"0 is greedy decoding; above it, up to {MAX_TEMPERATURE:g}, tokens are sampled.",
    )
    prompts = forms.CharField(
        max_length=1024,
        initial=SHIPPED_PROMPTS,
        help_text=f'"{SHIPPED_PROMPTS}", or the path of a JSONL file with "prompt" or "turns" in each line.',
    )
    budget_seconds = forms.FloatField(label="Time budget (seconds)", min_value=1, initial=Budget().seconds)
    budget_trials = forms.IntegerField(label="Trials at most", min_value=1, max_value=10_000, initial=Budget().trials)
    seed = forms.IntegerField(min_value=0, max_value=2**31 - 1, initial=0)

    def launch(self, owner: User) -> Search | None:
        """The new search of a valid form, or None with the error beside its field."""
        data: dict[str, Any] = self.cleaned_data
        regime = Regime(
            max_prompt_tokens=data["max_prompt_tokens"],
            max_new_tokens=data["max_new_tokens"],
            temperature=data["temperature"],
            prompts=data["prompts"],
        )
        deployment = Deployment(
            target=data["target"],
            drafter=data["drafter"],
            regime=regime,
            platform=data["platform"],
            dtype=data["dtype"],
        )
        budget = Budget(seconds=data["budget_seconds"], trials=data["budget_trials"])
        try:
            return services.create_search(owner=owner, deployment=deployment, budget=budget, seed=data["seed"])
        except UserError as error:
            self.add_error(FIELD_OF.get(error.field), error.sentence)
            return None
