"""A function of the user's as a tracker: called with the step and the figures of each line, once per line."""

from collections.abc import Mapping
from typing import Any

from flambeau.run.options.track import LineFunction
from flambeau.run.trackers.tracker import Place, RunFacts, stored_place


class LineCalls:
    """Calls a function; see `Tracker`.

    Args:
        function: of the user's.
        name: under which it is noted how far lines were passed to it.
    """

    flush_s = 0.0

    def __init__(self, function: LineFunction, name: str, facts: RunFacts) -> None:
        self._function, self._name, self._facts = function, name, facts

    def start(self) -> Place:
        """Lines that it got before are not passed again, although a resume makes them again."""
        return stored_place(self._facts.record(self._name))

    def line(self, step: int, figures: dict[str, float]) -> None:
        """The call."""
        self._function(step, figures)

    def go_back(self, place: Place) -> Place:
        """The next lines have smaller steps than the last ones."""
        return place

    def flush(self, sent: Place) -> None:
        """Note how far lines were passed to it."""
        self._facts.note(self._name, sent._asdict())

    def end(self, result: Mapping[str, Any] | None) -> None:
        """Nothing is open."""
