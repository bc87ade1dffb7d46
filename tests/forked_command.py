"""`flambeau` as a process that need not import torch again: three seconds of a core less per start.

A server, started once, has torch loaded and forks for each command. What a test sees of it is what it sees
of a subprocess: a session and an output of its own, signals, an exit code.
"""

import gc
import io
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

_PRELOADED = [
    "flambeau.train.fit_classifier",
    "flambeau.train.build.auto_settings",
    "flambeau.cli.command",
    "torch._dynamo",  # which the first optimizer imports
]


class ForkedCommand:
    """A running command, with what is used of `subprocess.Popen`.

    Args:
        words: the arguments of `flambeau`.
        output: takes standard output and error.
        environ: all of its environment.
    """

    def __init__(
        self, words: Sequence[str], *, output: IO[Any], environ: Mapping[str, str]
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        folder = f"{Path(__file__).parent}"
        if folder not in sys.path:
            sys.path.append(folder)  # there the new process finds this module
        from forked_command import run  # type: ignore[import-not-found]

        self._process = context.Process(
            target=run,
            args=(
                list(words),
                output.name,
                dict(environ),
                f"{Path.cwd()}",
                os.sched_getaffinity(0),
            ),
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        while self.poll() is None and os.getpgid(self.pid) != self.pid:
            time.sleep(0.001)

    def poll(self) -> int | None:
        """The exit code, minus the signal's number for a killed one; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code when it has ended.

        Raises:
            TimeoutError: it has not.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutError(f"process {self.pid} has not ended in {timeout} s")
        return self._process.exitcode

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()


def run(
    words: list[str], output: str, environ: dict[str, str], folder: str, cores: set[int]
) -> None:
    """The life of the new process."""
    gc.freeze()  # a collection of garbage would copy a page for each object of the server
    os.setsid()
    os.sched_setaffinity(0, cores)
    # A child of a fork server would start its data workers from a fork server too.
    multiprocessing.set_start_method("fork", force=True)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(
            number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        )
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    log = os.open(output, os.O_WRONLY | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for fd, number in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(fd, number)
    sys.stdin = io.TextIOWrapper(io.FileIO(0))
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.FileIO(number, "w"), line_buffering=True) for number in (1, 2)
    )

    from flambeau.cli.command import main

    sys.exit(main(words))
