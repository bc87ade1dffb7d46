"""What a run holds beside memory: the watch, the signals, the folder."""

import contextlib
import os
import weakref


def closed_when_dropped(
    owner: object, resources: contextlib.ExitStack
) -> "weakref.finalize[[int], object]":
    """Give resources back when this is called, or when their owner is dropped; never in a forked process.

    Args:
        owner: of them.
        resources: their copies in a forked process belong to nobody.
    """

    def close(process: int) -> None:
        if os.getpid() == process:
            resources.close()

    finalizer = weakref.finalize(owner, close, os.getpid())
    finalizer.atexit = False
    return finalizer
