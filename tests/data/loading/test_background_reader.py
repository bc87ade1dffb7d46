"""Reading ahead in a thread: against reading in line, and where the thread must end."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from flambeau.data.datasets.image_dataset import ImageDataset
from flambeau.data.loading import loader as loader_module
from flambeau.data.loading.background_reader import prefetch
from flambeau.data.loading.batch_layout import BatchLayout
from flambeau.data.loading.loader import Loader, ReadOptions
from flambeau.data.loading.seeded_dataset import SeededDataset
from flambeau.data.loading.workers.transport import pinned
from flambeau.errors import InputError
from flambeau.recipes.data.device_prefetch import prefetch_to_device

LONG_S = 20.0  # that no test waits for unless it fails


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("read-ahead")]


def until(condition: Any) -> None:
    stop = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < stop
        time.sleep(0.001)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_order_and_bound(depth: int) -> None:
    begun: list[int] = []

    def read(number: int) -> int:
        begun.append(number)
        return number * number

    results = prefetch(range(12), read, depth=depth)
    assert begun == []  # nothing is read before anybody asks
    for number in range(12):
        assert next(results) == number * number
        ahead = min(12, number + 1 + depth)
        until(lambda: len(begun) >= ahead)  # noqa: B023 - called here
        assert begun == list(range(ahead))
    assert list(results) == []
    assert threads() == []


def test_a_depth_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^depth must be at least 1, got 0$"):
        prefetch([], str, depth=0)


def test_start_is_called_first_in_the_thread_that_reads() -> None:
    where: list[int] = []

    def note(_: Any = None) -> None:
        where.append(threading.get_ident())

    list(prefetch("ab", note, start=note))
    assert len(where) == 3
    assert set(where) - {threading.get_ident()} == {where[0]}


def test_an_error_comes_where_its_result_would_have() -> None:
    def read(number: int) -> int:
        if number == 3:
            raise InputError("the fourth is bad")
        return number

    seen = []
    with pytest.raises(InputError, match="the fourth is bad"):
        for number in prefetch(range(9), read):
            seen.append(number)
    assert seen == [0, 1, 2]
    assert threads() == []


def test_an_error_of_what_is_to_be_read_waits_for_its_turn() -> None:
    def parts() -> Iterator[int]:
        yield from (0, 1)
        raise RuntimeError("no order")

    seen = []
    with pytest.raises(RuntimeError, match="no order"):
        for number in prefetch(parts(), int):
            seen.append(number)
    assert seen == [0, 1]


def test_the_thread_ends_with_the_loop() -> None:
    results = prefetch(range(99), int)
    assert next(results) == 0
    assert threads()
    results.close()
    assert threads() == []
    results = prefetch(range(99), int)
    next(results)
    del results
    assert threads() == []
    with pytest.raises(KeyboardInterrupt):
        for _ in prefetch(range(99), int):
            raise KeyboardInterrupt
    assert threads() == []


def test_a_loop_that_is_collected_in_the_thread_itself_ends() -> None:
    collect = threading.Event()

    def read(number: int) -> int:
        if number == 2:
            collect.wait(LONG_S)
            gc.collect()
        return number

    gc.disable()
    try:
        cycle: dict[str, Any] = {"results": prefetch(range(9), read)}
        cycle["itself"] = cycle
        assert next(cycle["results"]) == 0
        del cycle
        collect.set()
        until(lambda: threads() == [])
    finally:
        gc.enable()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_fork_waits_for_the_batch_under_way() -> None:
    busy = [False]

    def read(number: int) -> int:
        busy[0] = True
        time.sleep(0.2 * (number == 1))
        busy[0] = False
        return number

    results = prefetch(range(3), read)
    assert next(results) == 0
    until(lambda: busy[0])
    child = os.fork()
    if not child:
        results.close()  # as a child that ends in the usual way would
        os._exit(busy[0])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert list(results) == [1, 2]


LEFT_OPEN = """
import sys, time
from flambeau.data.loading.background_reader import prefetch

def read(number):
    if number == 1:
        print("reading", flush=True)
        time.sleep(float(sys.argv[1]))
    return number

results = prefetch(range(99), read)
next(results)
if sys.argv[2] == "wait":
    next(results)
"""


def test_an_open_loop_does_not_keep_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", LEFT_OPEN, "0.1", "leave"],
        capture_output=True,
        timeout=LONG_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT to send")
def test_ctrl_c_while_a_batch_is_waited_for() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", LEFT_OPEN, "0.4", "wait"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=LONG_S)
    assert process.returncode == -signal.SIGINT
    assert errors.rstrip().endswith(b"KeyboardInterrupt")


class Seeded(SeededDataset):
    """Tells where it was read, and at which addresses its batches lie."""

    def __init__(self, device: str | None = None) -> None:
        self.where: list[int] = []
        self.addresses: list[int] = []
        if device is not None:
            self.device = torch.device(device)

    def __len__(self) -> int:
        return 23

    def batch(self, indices: Tensor, seeds: Tensor) -> tuple[Any, Sequence[int]]:
        self.where.append(threading.get_ident())
        batch = indices.clone(), seeds.clone()
        if hasattr(self, "device"):
            batch = indices.to(self.device), seeds.to(self.device)
        self.addresses.append(batch[0].data_ptr())
        return batch, [index for index in indices.tolist() if index == 7]


class Plain(Dataset[int]):
    def __init__(self) -> None:
        self.where: list[int] = []

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> int:
        self.where.append(threading.get_ident())
        return index


@pytest.mark.parametrize("position", [0, 8, 20])
def test_the_stream_is_that_of_reading_in_line(position: int) -> None:
    streams = [
        list(
            Loader(
                Seeded(), BatchLayout(4, accumulate=2), seed=3, reading=ReadOptions(ahead=ahead)
            ).stream(epoch=1, position=position, epochs=2)
        )
        for ahead in (0, 2)
    ]
    for ours, theirs in zip(*streams, strict=True):
        assert all(map(torch.equal, ours.data, theirs.data))
        assert np.array_equal(ours.indices, theirs.indices)
        for name in set(ours._fields) - {"data", "indices"}:
            assert getattr(ours, name) == getattr(theirs, name)


def test_what_is_read_and_not_used_does_not_count() -> None:
    dataset, bad = Seeded(), list[int]()
    loader = Loader(
        dataset, BatchLayout(1), shuffle=False, on_bad=bad.extend, reading=ReadOptions(ahead=2)
    )
    stream = loader.stream(epoch=0, position=0)
    for number in range(7):
        assert next(stream).position == number + 1
    until(lambda: len(dataset.where) == 9)  # the bad one, number 7, has been read
    assert bad == []
    next(stream)
    assert bad == [7]


def test_only_data_without_global_generators_are_read_in_the_thread() -> None:
    for dataset, is_here in ((Seeded(), False), (Plain(), True)):
        ahead = None if is_here else 2
        list(
            Loader(dataset, BatchLayout(8), reading=ReadOptions(ahead=ahead)).stream(
                epoch=0, position=0, epochs=1
            )
        )
        assert (threading.get_ident() in dataset.where) == is_here
        assert len(set(dataset.where)) == 1


@pytest.mark.parametrize(("dataset", "workers"), [(Plain(), 0), (Seeded(), 2), (Seeded("meta"), 0)])
def test_a_thread_that_would_not_read_is_refused(dataset: Dataset[Any], workers: int) -> None:
    with pytest.raises(InputError, match=r"^ahead = 2 "):
        Loader(dataset, BatchLayout(8), reading=ReadOptions(workers=workers, ahead=2))


def test_pinning_brings_the_thread_and_happens_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    where: list[int] = []

    def pin(batch: Any) -> Any:
        where.append(threading.get_ident())
        return tuple(t + 1000 for t in batch)

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    monkeypatch.setattr(torch.accelerator, "set_device_index", where.append)
    monkeypatch.setattr(loader_module, "pinned", pin)
    dataset = Seeded()
    loader = Loader(dataset, BatchLayout(8), shuffle=False, reading=ReadOptions(pin_memory=True))
    parts = list(loader.stream(epoch=0, position=0, epochs=1))
    assert torch.equal(torch.cat([p.data[0] for p in parts]), torch.arange(1000, 1023))
    assert where == [3, *dataset.where]
    assert threading.get_ident() not in where


def test_batches_made_on_a_device_are_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(loader_module, "pinned", None)
    dataset = Seeded("meta")
    loader = Loader(dataset, BatchLayout(8), reading=ReadOptions(pin_memory=True))
    parts = list(loader.stream(epoch=0, position=0, epochs=1))
    assert [str(p.data[0].device) for p in parts] == ["meta"] * 3
    assert set(dataset.where) == {threading.get_ident()}
    with pytest.raises(InputError, match=r"^the data are held on meta: .* workers must be 0$"):
        Loader(dataset, BatchLayout(8), reading=ReadOptions(workers=4))


def test_what_is_pinned_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    there, elsewhere = torch.ones(2), torch.ones(3)
    monkeypatch.setattr(Tensor, "is_pinned", lambda t: t is there)
    monkeypatch.setattr(Tensor, "pin_memory", lambda t: t + 1)
    kept, (copied, name) = pinned((there, [elsewhere, "name"]))
    assert kept is there
    assert (copied.tolist(), name) == ([2.0] * 3, "name")


@pytest.mark.parametrize("ahead", [0, 2])
def test_no_copy_on_the_cpu(ahead: int) -> None:
    dataset = Seeded()
    stream = Loader(dataset, BatchLayout(8), reading=ReadOptions(ahead=ahead)).stream(
        epoch=0, position=0, epochs=1
    )
    batches = prefetch_to_device(((micro, micro.data) for micro in stream), "cpu")
    kept = [data for _, data in batches]
    assert [data[0].data_ptr() for data in kept] == dataset.addresses


def test_images_are_written_into_the_batch_itself(
    photos: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses: dict[int, list[int]] = {}
    write = ImageDataset._write_first_readable

    def noted(self: ImageDataset, index: int, seed: int, out: Tensor, *more: Any) -> int:
        addresses.setdefault(out.untyped_storage().data_ptr(), []).append(out.data_ptr())
        return write(self, index, seed, out, *more)

    monkeypatch.setattr(ImageDataset, "_write_first_readable", noted)
    dataset = ImageDataset(photos, image_size=24, channels=3, train=True)
    loader = Loader(dataset, BatchLayout(4), reading=ReadOptions(ahead=2))
    for micro in list(loader.stream(epoch=0, position=0, epochs=1)):
        images = micro.data[0]
        assert sorted(addresses[images.untyped_storage().data_ptr()]) == [
            image.data_ptr() for image in images
        ]


@pytest.fixture
def photos() -> Any:
    class Noise:
        classes, fingerprint = ("a", "b"), "none"
        labels = torch.arange(12) % 2
        names = tuple(map(str, range(12)))

        def __len__(self) -> int:
            return 12

        def describe(self, index: int) -> str:
            return f"noise {index}"

        def read(self, index: int) -> Any:
            shape = (40, 30 + index, 3)
            return np.random.default_rng(index).integers(0, 256, shape, np.uint8)

    return Noise()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_pinned_memory_is_used_again_and_never_under_a_batch_in_use(photos: Any) -> None:
    """Torch's allocator gives pinned memory out again once its tensor and the copies from it are done."""
    dataset = ImageDataset(photos, image_size=64, channels=3, train=True)
    loader = Loader(dataset, BatchLayout(4), reading=ReadOptions(pin_memory=True))
    stream = loader.stream(epoch=0, position=0)
    kept = next(stream).data[0]
    assert kept.is_pinned()
    before = kept.clone()
    addresses, sums, expected = set(), [], []

    def noted() -> Iterator[Tensor]:
        for _, micro in zip(range(60), stream, strict=False):
            addresses.add(micro.data[0].data_ptr())
            expected.append(int(micro.data[0].sum()))
            yield micro.data[0]

    sums = [images.sum(dtype=torch.int64) for images in prefetch_to_device(noted(), "cuda")]
    stream.close()
    assert [int(one) for one in sums] == expected
    assert torch.equal(kept, before)
    assert kept.data_ptr() not in addresses
    assert len(addresses) <= 12  # of 60: in use, on their way, ahead
