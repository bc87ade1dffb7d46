"""A Python that need not import torch again: two to five seconds of a core less per process.

A server, started once, has torch loaded and forks for each process. What a test sees of it is what it sees
of a subprocess: a session, output and `__main__` of its own, signals, an exit code. What it does not see:
torch being imported, flags of the interpreter other than `-W error`, and functions that run at the exit.
"""

import contextlib
import gc
import io
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

ALONE = """
import runpy, sys
for name in {"flambeau", *(name for name in sys.modules if name.startswith("flambeau."))}:
    sys.modules[name] = None
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].removesuffix("example.py"))
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Code for `run_python("-c", ALONE, "out/example.py", ...)`: the script where flambeau cannot be imported."""

_PRELOADED = [
    "flambeau.trainer.fit",
    "flambeau.trainer.parts.auto_settings",
    "flambeau.cli.command",
    "torch._dynamo",  # which the first optimizer imports
]


_fsync = os.fsync


def unsynced(file: int) -> None:
    """In place of `os.fsync`: it fails for what is no open file, and waits for no disk."""
    os.fstat(file)


@contextlib.contextmanager
def synced() -> Iterator[None]:
    """The real `os.fsync` for a while."""
    before = os.fsync
    os.fsync = _fsync
    try:
        yield
    finally:
        os.fsync = before


class ForkedPython:
    """A running process, with what is used of `subprocess.Popen`.

    Args:
        words: as those of `python`: a script, `-c` and code, or `-m` and a module; then its arguments.
        output: a file, pipe or terminal that is there, to which standard output is added.
        environ: all of its environment; as here by default.
        errors: the same for standard error; by default they go to `output`.
    """

    def __init__(
        self,
        words: Sequence[str | Path],
        *,
        output: Path,
        environ: Mapping[str, str] | None = None,
        errors: Path | None = None,
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self._process = context.Process(
            target=run,
            args=(
                [f"{word}" for word in words],
                [f"{output}", f"{errors or output}"],
                dict(os.environ if environ is None else environ),
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


def start_command(
    words: Sequence[str], *, output: IO[Any], environ: Mapping[str, str]
) -> ForkedPython:
    """`flambeau` with these words; `output` is a file with a name, opened to be added to."""
    return ForkedPython(["-m", "flambeau", *words], output=Path(output.name), environ=environ)


def run_python(
    *words: str | Path, environ: Mapping[str, str] | None = None, timeout: float = 120.0
) -> "subprocess.CompletedProcess[str]":
    """What `subprocess.run` gives for a Python with these words: its exit code, and its output as text.

    Raises:
        TimeoutError: it has not ended; it is killed then.
    """
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
        files = {"output": Path(out.name), "errors": Path(err.name)}
        process = ForkedPython(words, **files, environ=environ)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        return subprocess.CompletedProcess(words, code, out.read(), err.read())


def run(
    words: list[str], files: list[str], environ: dict[str, str], folder: str, cores: set[int]
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
    out, err = (os.open(file, os.O_WRONLY | os.O_APPEND) for file in files)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for fd, number in ((nothing, 0), (out, 1), (err, 2)):
        os.dup2(fd, number)
        os.close(fd)
    sys.stdin = io.TextIOWrapper(io.FileIO(0))
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.FileIO(number, "w"), line_buffering=True) for number in (1, 2)
    )

    if words[:2] == ["-W", "error"]:
        warnings.simplefilter("error")
        words = words[2:]
    how, *rest = words
    if how == "-m":
        sys.argv, sys.path[:0] = rest, [folder]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif how == "-c":
        sys.argv, sys.path[:0] = ["-c", *rest[1:]], [folder]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv, sys.path[:0] = words, [f"{Path(how).resolve().parent}"]
        runpy.run_path(how, run_name="__main__")
