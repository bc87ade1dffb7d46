"""Start the ranks of a job on this machine, alone or together with other nodes.

`job` runs them, through torch's elastic launch.
"""

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flambeau.errors import InputError
from flambeau.parallel.launcher.job_spec import JobSpec
from flambeau.parallel.launcher.rendezvous_address import LOOPBACK, find_place

_PROCS_PER_CPU = 8  # enough to try out a job on a small machine; chosen
_FOLDER = "flambeau-launch-"  # begins the names of our folders among the temporary ones
# A terminal that is closed sends SIGHUP, which no rank expects: to them it is SIGTERM.
_FORWARDED_AS = {
    getattr(signal, name): getattr(signal, sent)
    for name, sent in (
        ("SIGTERM", "SIGTERM"),
        ("SIGUSR1", "SIGUSR1"),
        ("SIGINT", "SIGINT"),
        ("SIGHUP", "SIGTERM"),
    )
    if hasattr(signal, name)
}


def launch(
    command: Sequence[str],
    *,
    procs: int,
    nodes: tuple[int, int] = (1, 1),
    rendezvous: str | None = None,
    job_id: str | None = None,
    node_rank: int | None = None,
    max_restarts: int = 0,
    local_addr: str | None = None,
    join_timeout_s: int = 600,
    say: Callable[[str], None],
) -> int:
    """Run a command on ranks of this machine and wait for them.

    Each rank has the environment that torchrun gives (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR ...). None
    outlives this process. SIGTERM, SIGUSR1 and the first Ctrl-C go to the ranks, which have as long as they
    need; the second Ctrl-C ends them. A rank that is stopped (SIGSTOP) is named, and killed when it is to
    end. The other ranks end soon after one that fails.

    Args:
        command: program and arguments; `${local_rank}` in them becomes the rank's number on this machine.
        procs: ranks on this machine.
        nodes: the fewest and the most machines; with fewer than the most the job goes on without lost ones.
        rendezvous: HOST:PORT, the same on all nodes, with one of them as HOST; needed for more than one.
        job_id: a name, the same on all nodes.
        node_rank: the place of this node among the others; without it torch sorts them.
        max_restarts: how often all ranks are started again after one has failed.
        local_addr: by which other nodes reach this machine.
        join_timeout_s: how long to wait for other nodes.
        say: prints a line to the user.

    Returns:
        0 if all ranks are done, 75 if they have saved themselves and want to be started again, 2 if one of
        them has refused its input, 130 after Ctrl-C, 1 after any other failure: the last line names it.

    Raises:
        InputError: an argument is wrong, a port is taken, a host unknown, or other nodes have not come.
    """
    spec = JobSpec(
        command=command,
        procs=procs,
        nodes=nodes,
        rendezvous=rendezvous,
        job_id="flambeau" if job_id is None else job_id,
        node_rank=node_rank,
        max_restarts=max_restarts,
        local_addr=local_addr,
        join_timeout_s=join_timeout_s,
    )
    return launch_job(spec, say=say)


def launch_job(
    spec: JobSpec,
    *,
    say: Callable[[str], None],
    note_loss: Callable[[Path, str], object] = lambda run, line: None,
) -> int:
    """`launch`, for a program that knows what the ranks do.

    Args:
        spec: the arguments of `launch`.
        say: prints a line to the user.
        note_loss: takes the folder of the run that rank 0 has named, and a line on how a rank was lost.

    Returns, Raises:
        What `launch` does.
    """
    spec.check()
    _check_procs(spec.procs)
    with _noted_signals() as signals, _folder() as folder:
        code, line = _run(spec, signals, folder, say, note_loss)
    if line is not None:
        # A rank may have left a progress bar in this line of a terminal.
        say(("\n" if sys.stderr.isatty() else "") + f"flambeau: {line}")
    return code


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A folder for this launcher; those of killed ones, whose locks are free, are removed."""
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
    """Refuse so many ranks that they would bring the machine to a halt; as many as it has GPUs may be."""
    with _quiet_torch():
        from flambeau.recipes.setup.environment import usable_cpus
    limit = max(_PROCS_PER_CPU * usable_cpus(), auto_procs())
    if procs > limit:
        raise InputError(
            f"{procs} processes are too many for this machine, which has {usable_cpus()} CPUs for them: "
            f"at most {limit}, of which each is a Python with torch"
        )


def auto_procs() -> int:
    """As many ranks as this machine has GPUs, or one."""
    with _quiet_torch():
        import torch
    return max(1, torch.cuda.device_count())


def _run(
    spec: JobSpec,
    signals: Sequence[signal.Signals],
    folder: Path,
    say: Callable[[str], None],
    note_loss: Callable[[Path, str], object],
) -> tuple[int, str | None]:
    """The exit code, and a last line for the user."""
    place = LOOPBACK
    if spec.rendezvous is not None:
        place = find_place(spec.rendezvous, node_rank=spec.node_rank, local_addr=spec.local_addr)
    with _quiet_torch():
        from flambeau.parallel.launcher.job import Job
    with _variables(_of_ranks(spec.procs, place.interface if spec.nodes[1] > 1 else None)):
        return Job(spec, place, folder, signals=signals, say=say, note_loss=note_loss).run()


def _of_ranks(procs: int, interface: str | None) -> dict[str, str]:
    """Variables for the ranks that the user has not set."""
    from flambeau.recipes.setup.environment import usable_cpus

    found = {"OMP_NUM_THREADS": str(max(1, usable_cpus() // procs))}
    if interface is not None:
        # Gloo itself asks the host name, which may lead to 127.0.1.1.
        found["GLOO_SOCKET_IFNAME"] = interface
    found = {name: value for name, value in found.items() if not os.environ.get(name)}
    # Torch's own handlers of signals would replace ours; a name that is none keeps them out.
    return found | {"TORCHELASTIC_SIGNALS_TO_HANDLE": "none"}


@contextlib.contextmanager
def _noted_signals() -> Iterator[list[signal.Signals]]:
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


@contextlib.contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
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
    """For the first import of torch: its C++ code reports a store that is gone on 20 lines of its own."""
    if "TORCH_CPP_LOG_LEVEL" in os.environ:
        yield
    else:
        with _variables({"TORCH_CPP_LOG_LEVEL": "FATAL"}):
            yield
