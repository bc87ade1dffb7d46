"""Signals to a launcher, noted for its ranks. No torch here: it is installed before torch is loaded."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

# A terminal that is closed sends SIGHUP, which no rank expects: to them it is SIGTERM.
_FORWARDED_AS = {
    getattr(signal, name): getattr(signal, sent)
    for name, sent in (
        ("SIGTERM", "SIGTERM"), ("SIGUSR1", "SIGUSR1"), ("SIGINT", "SIGINT"), ("SIGHUP", "SIGTERM"),
    )
    if hasattr(signal, name)
}  # fmt: skip


@contextlib.contextmanager
def noted_signals() -> Iterator[list[signal.Signals]]:
    """Take the signals over; the list grows by what is to be sent to the ranks.

    Outside of the main thread Python allows no handlers, and the list stays empty.
    """
    noted: list[signal.Signals] = []
    previous: dict[int, Any] = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number, sent in _FORWARDED_AS.items():
                # nohup has SIGHUP ignored, and means it.
                if signal.getsignal(number) is not signal.SIG_IGN or number == signal.SIGINT:

                    def note(*_: Any, sent: signal.Signals = sent) -> None:
                        noted.append(sent)

                    previous[number] = signal.signal(number, note)
        yield noted
    finally:
        while previous:
            number, handler = previous.popitem()
            signal.signal(number, handler)
