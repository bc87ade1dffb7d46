"""The processes of one training, started by torchrun or `flambeau launch`; often just one."""

import contextlib
import dataclasses
import datetime
import os
import socket
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not in __all__
from torch.distributed.distributed_c10d import PrefixStore, Store

from flambeau.errors import InputError
from flambeau.parallel.network_interface import interface_of, route
from flambeau.parallel.preemption import FLAG
from flambeau.parallel.watchdog.failure_detector import PACE, Member
from flambeau.parallel.watchdog.watchdog import LOST_PEER, Watchdog
from flambeau.recipes.parallel.process_group import awaited_at_exit
from flambeau.terminal import say

_START_S = 600  # for all ranks to import and join
_PATIENCE_S = 30  # of waiting for them, before the user is warned
# Of torch's collectives; the watchdog reports long before.
_GROUP_TIMEOUT = datetime.timedelta(minutes=30)
_T = TypeVar("_T")


class FailedElsewhere(SystemExit):
    """Another rank has failed and prints why; this one exits silently with code 76."""

    def __init__(self, cause: str) -> None:
        super().__init__(LOST_PEER)
        self.cause = cause

    def __str__(self) -> str:  # for who catches it, as Ray does
        return f"another rank has failed: {self.cause}"


class Ranks:
    """This process among those of the job. All ranks call every method alike.

    `group` is torch's, for objects and tensors on the CPU; None in a world of one.
    """

    def __init__(self, rank: int, world: int, group: dist.ProcessGroup | None) -> None:
        self.rank, self.world, self._group = rank, world, group
        self.host = socket.gethostname()
        self.watch: Watchdog | None = None
        self._num_watching = 0

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which alone writes files and prints."""
        return self.rank == 0

    def begin_watch(self, stall_timeout_s: float) -> None:
        """Start the watchdog; it runs until `end_watch` was called as often as this."""
        if self.world == 1:
            return
        self._num_watching += 1
        if self.watch is None:
            has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            store_s = (
                min(PACE.store_s, max(5.0, stall_timeout_s)) if stall_timeout_s else PACE.store_s
            )
            self.watch = Watchdog(
                Member(self.rank, self.world, self.host, store_rank=None if has_agent else 0),
                connect=_connect,
                prefix=self.broadcast(f"flambeau/{uuid.uuid4().hex}"),
                stall_timeout_s=stall_timeout_s,
                stop_signal=lambda: FLAG.signal,
                pace=dataclasses.replace(PACE, store_s=store_s),
            )
            self.watch.start()
        self.watch.resume(stall_timeout_s)

    def end_watch(self) -> None:
        """End the watchdog; report a passing exception to the other ranks instead.

        It becomes FailedElsewhere if another rank's loss caused it.
        """
        self._num_watching -= 1
        if self.watch is None or self._num_watching > 0:
            return
        watch = self.watch
        error = sys.exc_info()[1]
        if isinstance(error, GeneratorExit):
            watch.pause()  # `break`, or an error on its way to sys.excepthook: unknown yet
        elif error is None or isinstance(error, SystemExit):
            watch.stop()
            self.watch = None
        elif isinstance(error, (InputError, OSError, KeyboardInterrupt)):
            # The command catches these; the watchdog sees all others in sys.excepthook.
            watch.fail(f"{type(error).__name__}: {error}", 2)
        elif (cause := watch.explain(error)) is not None:
            raise FailedElsewhere(cause) from None

    def note_lost_ranks(self, run: Path, note: Callable[[str], object]) -> None:
        """Have the loss of a rank noted in a run folder: by our launcher, or else by rank 0."""
        if not self.is_first:
            return
        if path := os.environ.get("FLAMBEAU_RUN_FILE"):
            with contextlib.suppress(OSError):
                Path(path).write_bytes(os.fsencode(run.absolute()))
        elif self.watch is not None:
            self.watch.note = note

    def beat(self, phase: str) -> None:
        """Report to the watchdogs what comes next here."""
        if self.watch is not None:
            self.watch.beat(phase)

    @property
    def stops_next(self) -> bool:
        """Whether it is settled that the job stops at the next possible point."""
        return FLAG.signal is not None if self.watch is None else self.watch.stops_next

    def stop_signal(self) -> str | None:
        """The signal after which to stop here, if any; all ranks call it at the same points."""
        return FLAG.signal if self.watch is None else self.watch.reach_point()

    def first(self, work: Callable[[], _T]) -> _T:
        """What `work` returns on rank 0, which alone runs it; the others raise FailedElsewhere if it
        failed.
        """
        if self.world == 1:
            return work()
        try:
            outcome = (work(), None) if self.is_first else None
        except BaseException as error:
            self.broadcast((None, f"{type(error).__name__}: {error}"))
            raise
        value, cause = self.broadcast(outcome)
        if cause is not None:
            raise FailedElsewhere(cause)
        return value  # type: ignore[no-any-return]

    def each(self, work: Callable[[], _T]) -> _T:
        """What `work` returns here; all ranks run it, and continue only if none failed.

        Else InputError on rank 0, with the first failed rank's message, and FailedElsewhere on the others.
        """
        if self.world == 1:
            return work()
        value, cause = None, None
        try:
            value = work()
        except InputError as error:
            cause = str(error)
        causes = self.gather((self.host, cause))
        self.first(lambda: _refuse_failure(causes))
        return value  # type: ignore[return-value]

    def broadcast(self, value: Any) -> Any:
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def gather(self, value: _T) -> list[_T]:
        """The objects of all ranks, in their order, on all."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self._group)
        return values

    def pass_on(self, data: Tensor, *, by: int) -> Tensor:
        """The bytes of the rank that stands `by` ranks before this one, in a ring: uint8 on the CPU."""
        sizes = self.gather(len(data))
        source = (self.rank - by) % self.world
        received = torch.empty(sizes[source], dtype=torch.uint8)
        work = dist.isend(data, (self.rank + by) % self.world, group=self._group)
        dist.recv(received, source, group=self._group)
        if work is not None:
            work.wait()
        return received

    def broadcast_tensors(self, tensors: Sequence[Tensor], *, source: int = 0) -> None:
        """Overwrite tensors, alike on all ranks, with those of one rank."""
        if self.world == 1:
            return
        with torch.no_grad():
            for tensor in tensors:
                sent = tensor.contiguous()
                dist.broadcast(sent, src=source)
                if sent is not tensor:
                    tensor.copy_(sent)

    def worst(self, flag: Tensor) -> None:
        """Replace a tensor by its elementwise maximum over all ranks, without waiting for a CUDA device."""
        if self.world > 1:
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)

    def add_up(self, total: Tensor) -> None:
        """Replace a tensor by its elementwise sum over all ranks, without waiting for a CUDA device."""
        if self.world > 1:
            dist.all_reduce(total)

    def check_same(self, facts: Mapping[str, Any]) -> None:
        """Refuse ranks that disagree on small, picklable facts.

        InputError on rank 0, naming a rank and what differs there; FailedElsewhere on the others.
        """
        everyone = self.gather((self.host, dict(facts)))
        self.first(lambda: _refuse_difference(everyone))


def _refuse_failure(causes: Sequence[tuple[str, str | None]]) -> None:
    for rank, (host, cause) in enumerate(causes):
        if cause is not None:
            raise InputError(cause if rank == 0 else f"rank {rank} ({host}): {cause}")


def _refuse_difference(everyone: Sequence[tuple[str, dict[str, Any]]]) -> None:
    (host, first), *others = everyone
    for rank, (there, facts) in enumerate(others, start=1):
        for name in {**first, **facts}:
            if first.get(name) != facts.get(name):
                raise InputError(
                    f"rank {rank} ({there}) disagrees with rank 0 ({host}): {name} is "
                    f"{facts.get(name)!r} there and {first.get(name)!r} here.\n"
                    "All processes of a job need the same code, settings and data."
                )


def join_ranks() -> Ranks:
    """The ranks of this process's job; joins torch's process group if necessary."""
    world = int(_variable("WORLD_SIZE", "1"))
    joined = _JOINED.get((os.getpid(), dist.group.WORLD, world))
    if joined is None:
        joined = _join(world)
        _JOINED[os.getpid(), dist.group.WORLD, world] = joined  # _join may have made the group
    return joined


# By process, process group and world: all callers share one object, with one watchdog.
_JOINED: dict[tuple[int, dist.ProcessGroup | None, int], Ranks] = {}


def _join(world: int) -> Ranks:
    if dist.is_initialized():
        joined = dist.get_world_size()
        has_cpu = "gloo" in str(dist.get_backend_config())
        with awaited_at_exit():
            group: Any = dist.group.WORLD if has_cpu else dist.new_group(backend="gloo")
        return Ranks(dist.get_rank(), joined, group if joined > 1 else None)
    if world == 1:
        return Ranks(0, 1, None)
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise InputError(
            f"WORLD_SIZE={world} is set and {', '.join(missing)} is not: start the processes with "
            "`flambeau train --procs N`, `flambeau launch` or torchrun, or unset WORLD_SIZE"
        )
    if world > local_world():
        _choose_interface(os.environ["MASTER_ADDR"], int(_variable("MASTER_PORT", "0")))
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank() % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        rank = int(_variable("RANK", "0"))
        store = _connect()
        store = PrefixStore(_start_name(store, rank, world), store)
        with awaited_at_exit():
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=world, timeout=_GROUP_TIMEOUT
            )
    else:
        with awaited_at_exit():
            dist.init_process_group(backend, timeout=_GROUP_TIMEOUT)
    # Wait until all have joined: if a rank ended at once, with an error in its settings, the others would
    # wait for its connection, or report a socket error instead of its own.
    dist.all_reduce(torch.zeros(1))
    return Ranks(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)


def _connect() -> Store:
    """Connect to the store of the job: the agent's, or the one that rank 0 serves."""
    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(_variable("MASTER_PORT", "0")),
        is_master=False,
        timeout=datetime.timedelta(seconds=30),
        wait_for_workers=False,
    )


def _start_name(store: Store, rank: int, world: int) -> str:
    """A name that the ranks of this start of the job share, and earlier starts did not use.

    The agent's store survives a restart, and torch 2.15 would read the addresses of the previous ranks in it.
    So each rank registers under a new random word, and rank 0 answers each word until all ranks have
    acknowledged.
    """
    word = uuid.uuid4().hex
    started_at = time.monotonic()
    has_warned = False
    if rank:
        store.set(f"flambeau/came/{rank}", word)
        _wait_for_first(store, f"flambeau/answer/{word}", warns=rank == 1)
        name = store.get(f"flambeau/answer/{word}").decode()
        store.set(f"flambeau/{name}/{rank}", "")
        return name
    answered: dict[int, bytes] = {}
    missing = set(range(1, world))
    while missing:
        for other in sorted(missing):
            if store.check([f"flambeau/came/{other}"]):
                theirs = store.get(f"flambeau/came/{other}")
                if answered.get(other) != theirs:
                    answered[other] = theirs
                    store.set(f"flambeau/answer/{theirs.decode()}", word)
        missing = {r for r in missing if not store.check([f"flambeau/{word}/{r}"])}
        waited_s = time.monotonic() - started_at
        if waited_s > _START_S:
            raise InputError(_absent(min(missing), _START_S))
        if missing and waited_s > _PATIENCE_S and not has_warned:
            has_warned = True
            say(f"flambeau: {_absent(min(missing), _PATIENCE_S)}; waiting for {_START_S} s at most")
        time.sleep(0.02)
    return word


def _wait_for_first(store: Store, key: str, *, warns: bool) -> None:
    """Wait until rank 0 has written a key; one of the other ranks warns the user of a long wait."""
    try:
        store.wait([key], datetime.timedelta(seconds=_PATIENCE_S))
        return
    except dist.DistStoreError:
        if warns:
            say(f"flambeau: {_absent(0, _PATIENCE_S)}; waiting for {_START_S} s at most")
    try:
        store.wait([key], datetime.timedelta(seconds=_START_S - _PATIENCE_S))
    except dist.DistStoreError as error:
        raise InputError(_absent(0, _START_S)) from error


def _absent(rank: int, waited_s: int) -> str:
    return (
        f"rank {rank} has not joined the others within {waited_s} s: it is stopped, still busy with what its "
        "script does before, or was never started"
    )


def _choose_interface(address: str, port: int) -> None:
    """Let gloo listen where the other machines are, unless the user has set the interface.

    By default it uses the address of the host name, which on many machines is that of the loopback.
    """
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        with contextlib.suppress(OSError):
            if name := interface_of(route(socket.AF_INET, (address, port))):
                os.environ["GLOO_SOCKET_IFNAME"] = name


def local_rank() -> int:
    """The number of this process on its machine; 0 without a launcher."""
    return int(_variable("LOCAL_RANK", "0"))


def local_world() -> int:
    return int(_variable("LOCAL_WORLD_SIZE", "1"))


def _variable(name: str, default: str) -> str:
    value = os.environ.get(name, default)
    if not value.isdigit():
        raise InputError(f"the environment variable {name} is {value!r}, not a number")
    return value
