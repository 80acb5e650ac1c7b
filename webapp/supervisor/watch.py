"""A search in the supervisor's terminal: its events, read from the database as they come."""

from __future__ import annotations

from engine.search.console import Screen
from webapp.searches.models import Bundle, Event, Search
from webapp.searches.projection import PROJECTIONS


class Watch:
    """Tells the screen what is new each time it looks."""

    def __init__(self, search_id: int, screen: Screen, *, after: int = 0) -> None:
        self.search_id = search_id
        self._screen = screen
        self._seq = after

    def look(self) -> bool:
        """Show new events; whether the search has ended."""
        rows = list(Event.objects.filter(search_id=self.search_id, seq__gt=self._seq).order_by("seq"))
        if rows:
            view = PROJECTIONS.view(self.search_id)
            for row in rows:
                self._screen.event(row.value, view)
            self._seq = rows[-1].seq
        return Search.objects.get(pk=self.search_id).is_over

    def has_bundle(self) -> bool:
        return Bundle.objects.filter(search_id=self.search_id).exists()
