"""The one thread of this process that trains: torch's generators are the same for all threads."""

import contextlib
import threading
from collections.abc import Iterator

from flambeau.errors import InputError

_TRAINING: list[threading.Thread] = []  # once per training that is under way
_LOCK = threading.RLock()  # a run that is dropped meanwhile ends here


@contextlib.contextmanager
def training_here() -> Iterator[None]:
    """Keep other threads from training until the end; InputError: another thread trains."""
    here = threading.current_thread()
    with _LOCK:
        check_no_other_trains()
        _TRAINING.append(here)
    try:
        yield
    finally:
        with _LOCK:
            _TRAINING.remove(here)


def check_no_other_trains() -> None:
    """Raise InputError if another thread trains: both would draw from the same generators."""
    for thread in _TRAINING:
        if thread is not threading.current_thread() and thread.is_alive():
            raise InputError(
                f"thread {thread.name!r} of this process is training, and this is thread "
                f"{threading.current_thread().name!r}: both would draw from torch's generators, and neither "
                "would have the bits that it has alone\n"
                "Train one after the other, or in two processes"
            )


def check_made_here(maker: threading.Thread) -> None:
    """Raise InputError in another thread than the one that has made a run."""
    if maker is not threading.current_thread():
        raise InputError(
            f"this Run was made in thread {maker.name!r} and is used in thread "
            f"{threading.current_thread().name!r}: make it in the thread that trains"
        )
