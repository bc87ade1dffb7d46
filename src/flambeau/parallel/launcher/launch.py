"""Starts the ranks of a job on this machine, alone or together with other nodes.

`job` runs them, through torch's elastic launch.
"""

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from flambeau.errors import InputError
from flambeau.parallel.launcher.job_spec import JobSpec
from flambeau.parallel.launcher.rendezvous_address import LOOPBACK, find_rendezvous

_PROCS_PER_CPU = 8  # enough to try out a job on a small machine; chosen
_FOLDER = "flambeau-launch-"  # prefix of our temporary folders
# A closed terminal sends SIGHUP, which no rank expects: they get SIGTERM.
_FORWARDED_AS = {
    getattr(signal, name): getattr(signal, sent)
    for name, sent in (
        ("SIGTERM", "SIGTERM"),
        ("SIGUSR1", "SIGUSR1"),
        ("SIGXCPU", "SIGXCPU"),
        ("SIGINT", "SIGINT"),
        ("SIGHUP", "SIGTERM"),
    )
    if hasattr(signal, name)
}


def launch(
    spec: JobSpec,
    *,
    say: Callable[[str], None],
    note_lost_rank: Callable[[Path, str], object] = lambda run, line: None,
) -> int:
    """Run a command on ranks of this machine and wait for them.

    Each rank has torchrun's environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR ...). None outlives this
    process. SIGTERM, SIGUSR1 and the first Ctrl-C are forwarded to ranks, with unlimited time; the second
    Ctrl-C kills them. A stopped rank (SIGSTOP) is named, and killed if it is to end. If one fails, the others
    end soon.

    Args:
        note_lost_rank: takes rank 0's run folder, and how a rank was lost.

    Returns:
        0 if all ranks are done, 75 if they have saved and are to be started again, 2 if one refused its
        input, 130 after Ctrl-C, 1 after any other failure, which the last line names.

    Raises:
        InputError: a wrong argument, a taken port, an unknown host, or missing nodes.
    """
    spec.check()
    _check_procs(spec.procs)
    with _noted_signals() as signals, _folder() as folder:
        rendezvous = LOOPBACK
        if spec.rendezvous is not None:
            rendezvous = find_rendezvous(
                spec.rendezvous, node_rank=spec.node_rank, local_addr=spec.local_addr
            )
        with _quiet_torch():
            from flambeau.parallel.launcher.job import Job
        interface = rendezvous.interface if spec.nodes[1] > 1 else None
        with _environment(_rank_environment(spec.procs, interface)):
            job = Job(
                spec, rendezvous, folder, signals=signals, say=say, note_lost_rank=note_lost_rank
            )
            code, line = job.run()
    if line is not None:
        # A rank may have left a progress bar in the current line.
        say(("\n" if sys.stderr.isatty() else "") + f"flambeau: {line}")
    return code


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A folder for this launcher; those of killed launchers, whose locks are free, are removed."""
    import fcntl

    for old in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        with contextlib.suppress(OSError):
            handle = os.open(old, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(handle).st_uid == os.getuid() and any(old.iterdir()):
                    shutil.rmtree(old, ignore_errors=True)
            finally:
                os.close(handle)
    with tempfile.TemporaryDirectory(prefix=_FOLDER, ignore_cleanup_errors=True) as folder:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield Path(folder)
        finally:
            os.close(handle)


def _check_procs(procs: int) -> None:
    """Refuse more ranks than the machine can bear; as many as it has GPUs are always allowed."""
    with _quiet_torch():
        from flambeau.recipes.setup.environment import usable_cpus
    limit = max(_PROCS_PER_CPU * usable_cpus(), auto_procs())
    if procs > limit:
        raise InputError(
            f"{procs} processes are too many for this machine, which has {usable_cpus()} CPUs for them: "
            f"at most {limit}, of which each is a Python with torch"
        )


def auto_procs() -> int:
    """The number of GPUs of this machine, or one."""
    with _quiet_torch():
        import torch
    return max(1, torch.cuda.device_count())


def _rank_environment(procs: int, interface: str | None) -> dict[str, str]:
    """Environment variables for the ranks, except those that the user has set."""
    from flambeau.recipes.setup.environment import usable_cpus

    values = {"OMP_NUM_THREADS": str(max(1, usable_cpus() // procs))}
    if interface is not None:
        # By default gloo looks up the host name, which may lead to 127.0.1.1.
        values["GLOO_SOCKET_IFNAME"] = interface
    values = {name: value for name, value in values.items() if not os.environ.get(name)}
    # Keeps torch from replacing our signal handlers: "none" is not the name of a signal.
    return values | {"TORCHELASTIC_SIGNALS_TO_HANDLE": "none"}


@contextlib.contextmanager
def _noted_signals() -> Iterator[list[signal.Signals]]:
    """Handle the signals; the yielded list grows by those to forward to the ranks.

    Outside of the main thread Python allows no handlers, and the list stays empty.
    """
    noted: list[signal.Signals] = []
    previous: dict[int, Any] = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number, sent in _FORWARDED_AS.items():
                # nohup ignores SIGHUP on purpose.
                if signal.getsignal(number) is not signal.SIG_IGN or number == signal.SIGINT:

                    def note(*_: Any, sent: signal.Signals = sent) -> None:
                        noted.append(sent)

                    previous[number] = signal.signal(number, note)
        yield noted
    finally:
        while previous:
            number, handler = previous.popitem()
            signal.signal(number, handler)


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _quiet_torch() -> Iterator[None]:
    """For the first import of torch, whose C++ code prints 20 lines when a store is gone."""
    if "TORCH_CPP_LOG_LEVEL" in os.environ:
        yield
    else:
        with _environment({"TORCH_CPP_LOG_LEVEL": "FATAL"}):
            yield
