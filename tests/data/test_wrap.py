"""Anyone's data set: exact, resumable, and with workers that are named when they fail."""

import ctypes
import errno
import gc
import itertools
import multiprocessing
import multiprocessing.synchronize
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from flambeau.data.loading.workers.processes import Workers
from flambeau.data.loading.workers.transport import received, to_send
from flambeau.data.wrap import wrap
from flambeau.errors import InputError, WorkerLost
from flambeau.recipes.data.samplers import BalancedSampler, SubsetSampler


class Noisy(Dataset[tuple[int, Tensor]]):
    """Its transform draws from all three global generators."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, torch.randn(2) + random.random() + float(np.random.rand())


def epoch_of(batches: Any) -> list[tuple[list[int], list[float]]]:
    return [(indices.tolist(), noise.flatten().tolist()) for indices, noise in batches]


def test_epochs_depend_on_nothing_but_the_seed() -> None:
    expected = wrap(Noisy(), batch_size=4, seed=1)
    first, second = epoch_of(expected), epoch_of(expected)
    assert sorted(i for indices, _ in first for i in indices) == list(range(23))
    assert first != second
    assert [len(indices) for indices, _ in first] == [4, 4, 4, 4, 4, 3]
    assert len(expected) == 6
    with_workers = wrap(Noisy(), batch_size=4, seed=1, workers=2)
    assert [epoch_of(with_workers), epoch_of(with_workers)] == [first, second]
    assert epoch_of(wrap(Noisy(), batch_size=4, seed=2)) != first


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("at", [0, 1, 4, 5])
def test_a_pass_goes_on_where_the_state_says(workers: int, at: int) -> None:
    uninterrupted = wrap(Noisy(), batch_size=4)
    whole, following = epoch_of(uninterrupted), epoch_of(uninterrupted)
    batches = wrap(Noisy(), batch_size=4)
    for number, _ in enumerate(batches):
        if number == at:
            break
    state = batches.state_dict()
    other = wrap(Noisy(), batch_size=4, workers=workers)
    other.load_state_dict(state)
    assert epoch_of(other) == whole[at + 1 :]
    assert other.state_dict() == {"epoch": 1, "position": 0}
    # Without that, a pass that was broken off is begun anew; after its last batch it was over.
    assert epoch_of(batches) == (whole if at < 5 else following)


def test_a_last_batch_can_be_left_out() -> None:
    batches = wrap(Noisy(), batch_size=4, drop_last=True)
    assert [len(indices) for indices, _ in batches] == [4] * 5
    assert len(batches) == 5
    assert len(wrap(Noisy(), batch_size=23, drop_last=True)) == 1


def test_a_sampler_chooses() -> None:
    sampler = BalancedSampler([0] * 20 + [1] * 3, 10, seed=4)
    batches = wrap(Noisy(), batch_size=4, sampler=sampler, workers=1)
    seen = [[i for indices, _ in epoch_of(batches) for i in indices] for _ in range(2)]
    assert seen == [sampler.order(0).tolist(), sampler.order(1).tolist()]
    few = wrap(Noisy(), batch_size=4, sampler=SubsetSampler([9, 2], shuffle=False))
    assert [indices for indices, _ in epoch_of(few)] == [[9, 2]]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(
    ("dataset", "settings", "words"),
    [
        (Stream(), {}, "Stream has no samples by index"),
        (object(), {}, "object has no samples by index"),
        (Noisy(), {"batch_size": 0}, "batch_size must be at least 1, got 0"),
        (Noisy(), {"workers": -1}, "workers must be at least 0, got -1"),
    ],
)
def test_refusals(dataset: Any, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        wrap(dataset, **{"batch_size": 4, **settings})


# ---------------------------------------------------------------- workers


class Failing(Dataset[Tensor]):
    """Something happens at sample 17."""

    def __init__(self, what: Callable[[], object]) -> None:
        self._what = what

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Tensor:
        if index == 17:
            self._what()
        return torch.ones(3) * index


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def torch_iterators() -> set[int]:
    """Those alive, by address; nobody else collects garbage."""
    names = ((type(one).__name__, id(one)) for one in gc.get_objects())
    return {address for name, address in names if name == "_MultiProcessingDataLoaderIter"}


def stopped() -> None:
    """It stands still with batches sent, whose memory the parent has yet to ask it for."""
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (killed, r"has been reading sample 17 and was killed by signal: Killed"),
        (
            lambda: os._exit(3),
            r"has been reading sample 17 and exited unexpectedly with exit code 3",
        ),
        (lambda: time.sleep(60), r"has been reading sample 17 for \d s\nSee what blocks it there"),
        (stopped, r"has been reading sample 17 for \d s\nSee what blocks it there"),
    ],
)
def test_a_worker_that_dies_or_hangs_is_named_with_its_sample(
    what: Callable[[], object], words: str
) -> None:
    before = torch_iterators()
    batches = wrap(Failing(what), batch_size=4, workers=2, shuffle=False, stall_timeout=1.0)
    seen = []
    with pytest.raises(WorkerLost, match=rf"data worker 0 \(process \d+\) {words}") as error:
        for batch in batches:
            seen.append(int(batch[0, 0]))
            time.sleep(0.05)  # a step, in which nothing is raised
    assert torch_iterators() <= before, "the traceback keeps torch's iterator"
    assert error.value.__traceback__ is not None
    assert seen == [0, 4, 8, 12][: len(seen)] != []


class Unsent:
    """A sample that no pipe takes."""

    def __reduce__(self) -> Any:
        raise TypeError("this cannot be pickled")


class Lacking(Dataset[Any]):
    """From its tenth sample on no file can be opened, or a sample cannot be handed over."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        if index == 10 and self.what == "files":
            lowest_free = os.dup(0)  # the limit is on numbers, of which some below may be free
            os.close(lowest_free)
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, lowest_free + 1))
        if index == 10 and self.what == "sample":
            return Unsent()
        return torch.full((2,), index)


@pytest.mark.skipif(sys.platform != "linux", reason="a limit of open files as on Linux")
@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("files", "too many open files; raise the limit"),
        ("sample", "TypeError: this cannot be pickled"),
    ],
)
def test_a_worker_that_cannot_hand_over_a_batch_ends_and_says_why(
    what: str, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """It would be waited for until it is taken for stalled, and print tracebacks until then."""
    batches = wrap(
        Lacking(what), batch_size=4, workers=2, shuffle=False, collate=list, stall_timeout=300
    )
    with pytest.raises(WorkerLost, match=f"could not hand over a batch: {reason}") as error:
        list(batches)
    assert re.match(r"data worker \d \(process \d+\)", str(error.value))
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_without_shared_memory_for_their_queues_workers_are_not_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    usage = shutil.disk_usage(".")._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(multiprocessing.synchronize.SemLock, "__init__", full)
    with pytest.raises(
        InputError, match="2 data workers cannot be started: no space left in shared"
    ):
        list(wrap(Noisy(), batch_size=4, workers=2))
    gc.collect()


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_workers_that_cannot_be_started_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two: the first does not stay."""
    fork, calls = os.fork, list[str]()

    def one() -> int:
        calls.append("")
        if len(calls) == 2:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return fork()

    monkeypatch.setattr(os, "fork", one)
    with pytest.raises(InputError, match=r"2 data workers cannot be started: .*`ulimit -u`"):
        list(wrap(Noisy(), batch_size=4, workers=2))
    gc.collect()
    began = time.monotonic()
    while multiprocessing.active_children():
        assert time.monotonic() - began < 30


def failed() -> None:
    raise ValueError("sample 17 is odd")


def test_an_error_of_the_dataset_leaves_no_worker_behind() -> None:
    """Its traceback is alive, and nobody collects garbage."""
    with pytest.raises(ValueError, match="sample 17 is odd") as error:
        list(wrap(Failing(failed), batch_size=4, workers=2, shuffle=False))
    began = time.monotonic()
    while multiprocessing.active_children():
        assert time.monotonic() - began < 30
    assert error.value.__traceback__ is not None


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_that_would_not_be_heard_of_is_told(workers: int) -> None:
    class Mine(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__(f"{one} and {two}")

    def mine() -> None:
        raise Mine(1, 2)

    for what, words in (
        (lambda: next(iter(())), "sample 17: StopIteration"),
        (mine, "sample 17: Mine 1 and 2" if workers else "1 and 2"),
    ):
        batches = wrap(Failing(what), batch_size=4, workers=workers, shuffle=False)
        with pytest.raises(Exception, match=words):
            list(batches)


def test_workers_outlast_the_thread_that_has_begun() -> None:
    batches = iter(wrap(Failing(lambda: None), batch_size=4, workers=2, shuffle=False))
    begun = []
    thread = threading.Thread(target=lambda: begun.append(next(batches)))
    thread.start()
    thread.join()
    time.sleep(0.1)
    assert len(begun + list(batches)) == 10


class Batches:
    """A DataLoader's iterator that raises these."""

    def __init__(self, *errors: Exception) -> None:
        self._errors = iter(errors)

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> Any:
        raise next(self._errors)


@pytest.mark.parametrize("first", [ConnectionResetError(), EOFError(), FileNotFoundError()])
def test_a_worker_that_dies_while_its_batch_is_fetched_is_named(first: Exception) -> None:
    dead = RuntimeError("DataLoader worker (pid(s) 4711) exited unexpectedly")
    workers = Workers(2, stall_timeout=60, describe=str)
    with pytest.raises(WorkerLost, match="exited unexpectedly"):
        list(workers.watched(Batches(first, dead)))
    with pytest.raises(type(first)):  # the dataset's own
        list(workers.watched(Batches(type(first)("Caught it in DataLoader worker process 0."))))
    with pytest.raises(type(first)):
        list(Workers(0, stall_timeout=60, describe=str).watched(Batches(first)))


def test_a_slow_sample_is_waited_for() -> None:
    batches = wrap(
        Failing(lambda: time.sleep(2.5)), batch_size=4, workers=1, shuffle=False, stall_timeout=30
    )
    assert len(list(batches)) == 10


def test_an_error_of_the_data_set_is_its_own() -> None:
    def raises() -> None:
        raise KeyError("sample without a label")

    for workers in (0, 1):
        with pytest.raises(KeyError, match="sample without a label"):
            list(wrap(Failing(raises), batch_size=4, workers=workers))


# ---------------------------------------------------------------- a small /dev/shm


class Large(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.full((600_000,), index, dtype=torch.bfloat16), "name": f"{index}"}


def test_batches_come_through_where_shared_memory_is_small(start_ranks: Callable[..., Any]) -> None:
    """In a mount namespace with 2 MiB of it; a batch has 4.8 MB."""

    def work() -> tuple[list[float], list[str]] | None:
        libc = ctypes.CDLL(None, use_errno=True)
        new_mounts, private = 0x20000, 1 << 18 | 1 << 14  # CLONE_NEWNS, MS_PRIVATE | MS_REC
        if libc.unshare(new_mounts) or libc.mount(b"none", b"/", None, private, None):
            return None
        if libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=2m"):
            return None
        assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize == 2 << 20
        means = [
            float(batch["x"].float().mean())
            for batch in wrap(Large(), batch_size=4, workers=2, shuffle=False)
        ]
        return means, [path.name for path in Path("/dev/shm").iterdir()]

    (result,) = start_ranks(1, work).results()
    if result is None:
        pytest.skip("no right to make a mount namespace")
    assert result == ([1.5, 5.5, 9.5], [])  # torch leaves a name of what it has no room for


def test_what_goes_by_value_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    image = torch.arange(120, dtype=torch.uint8).reshape(2, 3, 4, 5)
    batch = {
        "image": image.contiguous(memory_format=torch.channels_last),
        "half": (torch.randn(3, 2).bfloat16(), [torch.tensor(7)]),
        "names": ["a", "b"],
        "empty": torch.empty(0, 3),
    }
    full = os.statvfs_result((4096, 4096, 100, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    sent = to_send(batch, workers=2)
    assert not any(isinstance(value, Tensor) for value in (sent["image"], *sent["half"]))
    back = received(sent)
    assert back["names"] == batch["names"]
    for name in ("image", "half", "empty"):
        torch.testing.assert_close(back[name], batch[name], rtol=0, atol=0)
    assert back["image"].stride() == batch["image"].stride()
    monkeypatch.setattr(
        os,
        "statvfs",
        lambda path: os.statvfs_result((4096, 4096, 1, 1 << 20, 1 << 20, 0, 0, 0, 0, 9)),
    )
    assert to_send(batch, workers=2) is batch


def is_running(pid: int) -> bool:
    """Not ended, or ended and not yet noticed by whoever has adopted it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_no_worker_outlives_a_killed_parent(
    start_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    class Noting(Failing):
        def __getitem__(self, index: int) -> Tensor:
            (tmp_path / str(os.getpid())).touch()
            return super().__getitem__(index)

    def noting() -> None:
        for _ in wrap(Noting(lambda: time.sleep(60)), batch_size=1, workers=2, shuffle=False):
            pass

    job = start_ranks(1, noting)
    deadline = time.monotonic() + 30
    while len(list(tmp_path.glob("[0-9]*"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    workers = [int(path.name) for path in tmp_path.glob("[0-9]*")]
    job.kill(0)
    deadline = time.monotonic() + 30
    while any(map(is_running, workers)):
        assert time.monotonic() < deadline, "a worker is still there"
        time.sleep(0.02)


SERVED = """
import multiprocessing, os, sys, time
from pathlib import Path
from flambeau.data.wrap import wrap

class Noting:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        Path(sys.argv[1], str(os.getpid())).touch()
        if index > 1:
            time.sleep(60)
        return index

if __name__ == "__main__":
    multiprocessing.set_start_method("forkserver")
    for batch in wrap(Noting(), batch_size=1, workers=2, shuffle=False):
        print(batch.tolist(), flush=True)
"""


@pytest.mark.slow  # workers of a fork server import torch anew
def test_workers_of_a_fork_server_work_and_end_with_the_parent(tmp_path: Path) -> None:
    """The default of Python 3.14 on Linux; such a worker is no child of the process that it works for."""
    script, pids = tmp_path / "served.py", tmp_path / "pids"
    script.write_text(SERVED)
    pids.mkdir()
    with subprocess.Popen(
        [sys.executable, script, pids], stdout=subprocess.PIPE, text=True
    ) as parent:
        try:
            assert parent.stdout is not None
            assert [parent.stdout.readline() for _ in range(2)] == ["[0]\n", "[1]\n"]
        finally:
            parent.kill()
    workers = [int(path.name) for path in pids.iterdir()]
    assert len(workers) == 2
    deadline = time.monotonic() + 30
    while any(map(is_running, workers)):
        assert time.monotonic() < deadline, "a worker is still there"
        time.sleep(0.02)


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_pass_that_has_given_all_is_over(drop_last: bool) -> None:
    """`zip` asks its range first, so nobody asks for a batch after the last."""
    batches = wrap(Noisy(), batch_size=4, seed=1, drop_last=drop_last)
    expected = [epoch_of(batches) for _ in range(3)]
    again = wrap(Noisy(), batch_size=4, seed=1, drop_last=drop_last)
    found = [
        epoch_of(batch for _, batch in zip(range(len(again)), again, strict=False))
        for _ in range(2)
    ]
    assert found == expected[:2]
    assert again.epoch == 1
    assert epoch_of(again) == expected[2]
    assert again.epoch == 3


def test_a_pass_that_is_left_before_its_end_begins_again_or_goes_on() -> None:
    whole = epoch_of(wrap(Noisy(), batch_size=4))
    batches = wrap(Noisy(), batch_size=4)
    for _ in range(2):
        assert epoch_of(itertools.islice(batches, 5)) == whole[:5]
    batches.load_state_dict(batches.state_dict())
    assert epoch_of(itertools.islice(batches, 1)) == whole[5:]
    batches.load_state_dict({"epoch": 0, "position": 20})
    assert epoch_of(batches) == whole[5:]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("length", "world"), [(10, 2), (9, 2), (13, 3), (14, 3), (16, 3)])
def test_all_processes_get_as_many_batches(
    monkeypatch: pytest.MonkeyPatch, length: int, world: int, drop_last: bool
) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: world)
    shares = []
    for rank in range(world):
        monkeypatch.setattr("torch.distributed.get_rank", lambda rank=rank: rank)
        batches = wrap(TensorDataset(torch.arange(length)), batch_size=4, drop_last=drop_last)
        shares.append([indices.tolist() for (indices,) in batches])
        assert len(shares[-1]) == len(batches)
    left_out = length % 4 if drop_last or length % 4 < world else 0
    seen = sorted(index for share in shares for batch in share for index in batch)
    assert len(set(seen)) == len(seen) == length - left_out
    with pytest.raises(InputError, match=f"1 samples cannot be shared by {world} processes"):
        wrap(TensorDataset(torch.arange(1)), batch_size=4)
