"""Stock as the reference of token forcing: its free runs, its scores of other texts, and its noise floor."""

from __future__ import annotations

from collections.abc import Callable

from engine.deployment import Deployment
from engine.judge.effort import Effort
from engine.judge.forcing import Floor, Sample, Scored, measure_floor
from engine.judge.hidden import HiddenPrompt, Material, draw
from engine.judge.protocol import Text
from engine.judge.seats import Seat, Seats
from engine.judge.store import Store

STOCK = "stock"


class Reference:
    """Unmodified stock in a child of its own. Free runs and the floor are kept in the search's folder."""

    def __init__(
        self,
        deployment: Deployment,
        material: Material,
        effort: Effort,
        seed: int,
        seats: Seats,
        store: Store,
        backend: str,
        progress: Callable[[str], None],
    ) -> None:
        self._deployment = deployment
        self._material = material
        self._effort = effort
        self._seed = seed
        self._seats = seats
        self._store = store
        self._backend = backend
        self._progress = progress
        self._max_new_tokens = deployment.regime.max_new_tokens

    def seat(self) -> Seat:
        """Stock's child, started where it is not running."""
        return self._seats.get(STOCK) or self._seats.start(STOCK, STOCK, self._backend, None)

    def solo_prompts(self) -> list[HiddenPrompt]:
        """The prompts on which stock is timed alone and its noise is measured."""
        return draw(self._material.prompts, self._seed, 0, self._effort.stock_prompts, "stock")

    def free_run(self, prompt: HiddenPrompt) -> Text:
        """What stock writes after `prompt`, decoded by itself."""
        stock = self.seat()
        text = self._store.text(stock.implementation, prompt.ids, self._max_new_tokens)
        if text is None:
            text = self.keep(prompt, stock.generate(prompt.ids, self._max_new_tokens).text)
        return text

    def keep(self, prompt: HiddenPrompt, text: Text) -> Text:
        """Remember a free run that was made for another purpose."""
        implementation = self.seat().implementation
        if self._store.text(implementation, prompt.ids, self._max_new_tokens) is None:
            self._store.keep_text(implementation, prompt.ids, self._max_new_tokens, text)
        return text

    def scored(self, prompt: HiddenPrompt, text: Text) -> Scored:
        """`text` with stock's scores, and with stock's free run of the prompt where that was made already."""
        stock = self.seat()
        return Scored(
            prompt=prompt.id,
            category=prompt.category,
            prompt_ids=prompt.ids,
            text=text,
            scores=stock.score(prompt.ids, text.ids),
            max_new_tokens=self._max_new_tokens,
            stock=self._store.text(stock.implementation, prompt.ids, self._max_new_tokens),
        )

    def floor(self) -> Floor:
        """Stock's noise floor on this device, measured once in a search."""
        stock = self.seat()
        floor = self._store.floor(stock.implementation)
        if floor is not None:
            return floor
        samples = []
        for prompt in self.solo_prompts()[: self._effort.floor_texts]:
            self._progress("measuring stock's noise floor")
            text = self.free_run(prompt)
            at_width = tuple((width, stock.score(prompt.ids, text.ids, width)) for width in self._effort.floor_widths)
            samples.append(Sample(text.ids, stock.score(prompt.ids, text.ids), at_width))
        floor = measure_floor(samples, self._deployment.dtype)
        self._store.keep_floor(stock.implementation, floor)
        return floor
