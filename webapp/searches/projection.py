"""States and views of searches, folded from their events once in each process and kept up to date."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from django.db import connection, transaction

from engine.search.state import State, fold_all
from engine.search.view import view
from webapp.searches.models import Event


@dataclass
class _Entry:
    state: State
    view: dict[str, Any] | None = None


class Projections:
    """The newest known state of the most recently used searches.

    A state may be kept because events never change. Inside a transaction nothing is kept before the commit: its
    events may be rolled back.
    """

    def __init__(self, capacity: int = 64) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._entries: OrderedDict[int, _Entry] = OrderedDict()

    def state(self, search_id: int) -> State:
        """The state after all events that this connection sees."""
        return self._entry(search_id).state

    def view(self, search_id: int) -> dict[str, Any]:
        """`engine.search.view.view` of that state. Shared between callers: read it, do not change it."""
        entry = self._entry(search_id)
        if entry.view is None:
            entry.view = view(entry.state)
        return entry.view

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()

    def _entry(self, search_id: int) -> _Entry:
        with self._lock:
            known = self._entries.get(search_id)
        after = known.state.seq if known else 0
        rows = Event.objects.filter(search_id=search_id, seq__gt=after).order_by("seq")
        events = [row.value for row in rows]
        if known is not None and not events:
            return known
        entry = _Entry(fold_all(events, known.state if known else None))
        if not connection.in_atomic_block:
            self._keep(search_id, entry)
        return entry

    def keep_on_commit(self, search_id: int, state: State) -> None:
        """Keep the state that the open transaction's events lead to, once they are there for good."""
        transaction.on_commit(lambda: self._keep(search_id, _Entry(state)), robust=True)

    def _keep(self, search_id: int, entry: _Entry) -> None:
        with self._lock:
            newest = self._entries.get(search_id)
            if newest is None or newest.state.seq < entry.state.seq:
                self._entries[search_id] = entry
            self._entries.move_to_end(search_id)
            while len(self._entries) > self._capacity:
                self._entries.popitem(last=False)


PROJECTIONS = Projections()
