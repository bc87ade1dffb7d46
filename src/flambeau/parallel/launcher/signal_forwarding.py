"""Signals to a launcher, passed on to its ranks. No torch here: it is installed before torch is loaded."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from flambeau.parallel.launcher.rank_processes import RankProcesses

# A terminal that is closed sends SIGHUP, which no rank expects: to them it is SIGTERM.
_PASSED_ON = {
    getattr(signal, name): getattr(signal, sent)
    for name, sent in (
        ("SIGTERM", "SIGTERM"), ("SIGUSR1", "SIGUSR1"), ("SIGINT", "SIGINT"), ("SIGHUP", "SIGTERM"),
    )
    if hasattr(signal, name)
}  # fmt: skip


class Asked(BaseException):
    """The launcher was asked to end while it had no ranks to pass that on to."""


class Relay:
    """Takes the signals over while it is entered; outside of the main thread Python allows no handlers.

    Attributes:
        asked: what ranks have been sent, in this order.
        interrupted: there has been a second SIGINT, and the ranks were killed.
        ranks: who holds the ranks, once there are any.
    """

    def __init__(self) -> None:
        self.asked: list[signal.Signals] = []
        self.interrupted = False
        self.ranks: RankProcesses | None = None
        self._previous: dict[int, Any] = {}
        self._may_raise = False

    def __enter__(self) -> "Relay":
        if threading.current_thread() is threading.main_thread():
            for number in _PASSED_ON:
                # nohup has SIGHUP ignored, and means it.
                if signal.getsignal(number) is not signal.SIG_IGN or number == signal.SIGINT:
                    self._previous[number] = signal.signal(number, self._handle)
        self._may_raise = True  # not before: what __enter__ raises, __exit__ does not clean up
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._may_raise = False
        while self._previous:
            number, handler = self._previous.popitem()
            signal.signal(number, handler)

    def check(self) -> None:
        """Raise `Asked` after a signal: what a handler raises is lost where Python is in a __del__."""
        if self.asked:
            raise Asked

    def _handle(self, number: int, frame: FrameType | None) -> None:
        sent: signal.Signals = _PASSED_ON[signal.Signals(number)]
        if sent == signal.SIGINT and sent in self.asked and self.ranks is not None:
            self.interrupted = True
            self.ranks.kill()
        self.asked.append(sent)
        reaches_ranks = self.ranks is not None and self.ranks.pass_on(sent)
        if self._may_raise and not reaches_ranks:
            raise Asked
