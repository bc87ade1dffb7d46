"""A call that may block for ever, in a thread: the main one has to hear signals and to watch the ranks.

Torch's store calls block when their host is stopped or cut off, whatever their timeout (measured, torch 2.11
and 2.15: a `get` with a timeout of 3 s against a stopped host).
"""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Background(threading.Thread, Generic[_T]):
    """Runs something at once.

    Attributes:
        error: what it has raised.
    """

    def __init__(self, work: Callable[[], _T]) -> None:
        super().__init__(daemon=True)
        self._work, self._values = work, list[_T]()
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        """Do it."""
        try:
            self._values.append(self._work())
        except Exception as error:
            self.error = error

    def result(self) -> _T:
        """Its value, once it has ended; or its error is raised."""
        if self.error is not None:
            raise self.error
        return self._values[0]
