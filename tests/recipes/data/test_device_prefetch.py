import contextlib
import time
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from flambeau.recipes.data import device_prefetch
from flambeau.recipes.data.device_prefetch import prefetch_to_device

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
# The meta device has no streams and holds no values, but it is another device: the way of a batch to any
# device but the CPU is tested with it on every machine.
DEVICES = ["cpu", "meta", pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])]
AHEAD = DEVICES[1:]

Pair = namedtuple("Pair", ["image", "name"])


class Source:
    """A source that remembers how many batches were taken, and whether it was closed."""

    def __init__(self, length: int, *, fails_at: int | None = None) -> None:
        self.taken = 0
        self.closed = False
        self.batches = self._run(length, fails_at)

    def _run(self, length: int, fails_at: int | None) -> Iterator[Tensor]:
        try:
            for index in range(length):
                if index == fails_at:
                    raise OSError(f"batch {index}")
                self.taken += 1
                yield torch.full((index + 1,), float(index))
        finally:
            self.closed = True


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("depth", [1, 2, 10])
@pytest.mark.parametrize("length", [0, 1, 5])
def test_same_batches_in_the_same_order(device: str, depth: int, length: int) -> None:
    source = Source(length)
    got = list(prefetch_to_device(source.batches, device, depth=depth))
    assert [batch.device.type for batch in got] == [device] * length
    assert [batch.shape for batch in got] == [(index + 1,) for index in range(length)]
    assert source.closed


def test_the_cpu_passes_the_same_objects() -> None:
    batches = [{"x": torch.ones(1)}, [torch.ones(2)], "anything"]
    got = list(prefetch_to_device(batches, torch.device("cpu")))
    assert all(mine is theirs for mine, theirs in zip(got, batches, strict=True))


def test_the_cpu_takes_nothing_ahead() -> None:
    source = Source(3)
    batches = prefetch_to_device(source.batches, "cpu", depth=2)
    next(batches)
    assert source.taken == 1


@pytest.mark.parametrize("device", AHEAD)
@pytest.mark.parametrize("depth", [1, 3])
def test_depth_batches_are_taken_ahead(device: str, depth: int) -> None:
    source = Source(10)
    batches = prefetch_to_device(source.batches, device, depth=depth)
    assert source.taken == 0
    for number in (1, 2, 3):
        next(batches)
        assert source.taken == number + depth


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("good", [0, 1, 4])
def test_an_exception_comes_after_the_good_batches(device: str, depth: int, good: int) -> None:
    source = Source(9, fails_at=good)
    batches = prefetch_to_device(source.batches, device, depth=depth)
    for _ in range(good):
        next(batches)
    with pytest.raises(OSError, match=f"batch {good}") as caught:
        next(batches)
    assert "_run" in [entry.name for entry in caught.traceback]  # where it was raised
    assert next(batches, None) is None
    assert source.closed


@pytest.mark.parametrize("device", DEVICES)
def test_closing_early_closes_the_source(device: str) -> None:
    source = Source(9)
    batches = prefetch_to_device(source.batches, device)
    next(batches)
    assert not source.closed
    batches.close()  # type: ignore[attr-defined]
    assert source.closed


@pytest.mark.parametrize("device", DEVICES)
def test_leaving_the_loop_closes_the_source(device: str) -> None:
    source = Source(9)
    for _ in prefetch_to_device(source.batches, device):
        break
    assert source.closed


@pytest.mark.parametrize("device", AHEAD)
def test_nests_keep_their_types_and_other_objects(device: str) -> None:
    thing = object()
    counts: defaultdict[str, Any] = defaultdict(int, x=torch.ones(2))
    batch = {
        "pair": Pair(torch.ones(3), "a.jpg"),
        "list": [torch.ones(1, dtype=torch.int32), 5, None],
        "tuple": (torch.ones(1), (torch.ones(1),)),
        "ordered": OrderedDict(b=torch.ones(1), a=1),
        "counts": counts,
        "size": torch.Size([2, 3]),
        "thing": thing,
    }
    (got,) = prefetch_to_device([batch], device)
    assert type(got["pair"]) is Pair
    assert got["pair"].image.device.type == device
    assert got["pair"].name == "a.jpg"
    assert got["list"][0].dtype == torch.int32
    assert [type(got["list"]), got["list"][1:]] == [list, [5, None]]
    assert got["tuple"][1][0].device.type == device
    assert list(got["ordered"]) == ["b", "a"]
    assert got["counts"].default_factory is int
    assert got["counts"]["x"].device.type == device
    assert got["size"] == torch.Size([2, 3])
    assert got["thing"] is thing
    assert batch["pair"].image.device.type == "cpu"  # the source's own batch is not changed
    assert counts["x"].device.type == "cpu"


@pytest.mark.parametrize("device", AHEAD)
def test_memory_format_is_kept(device: str) -> None:
    image = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)
    (got,) = prefetch_to_device([image], device)
    assert got.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("device", DEVICES)
def test_a_data_loader(device: str) -> None:
    loader = DataLoader(TensorDataset(torch.arange(10), torch.ones(10, 2)), batch_size=4)
    got = list(prefetch_to_device(loader, device))
    assert [x.shape[0] for x, _ in got] == [4, 4, 2]
    assert {x.device.type for pair in got for x in pair} == {device}


@pytest.mark.parametrize("device", DEVICES[:2])
@pytest.mark.parametrize("depth", [0, -1])
def test_depth_is_refused_at_once(device: str, depth: int) -> None:
    with pytest.raises(ValueError, match=f"depth must be at least 1, got {depth}"):
        prefetch_to_device([], device, depth=depth)


# ---------------------------------------------------------------- CUDA


class FakeStream:
    """Writes down what happens to it, in the one list of the test."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log
        self.num_events = 0

    def record_event(self) -> str:
        self.num_events += 1
        self.log.append(f"{self.name} records {self.num_events}")
        return str(self.num_events)

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")


def test_order_of_events_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls that the CUDA way makes, on stand-ins; what they do on a GPU is tested below."""
    log: list[str] = []
    copying, computing = FakeStream("copying", log), FakeStream("computing", log)

    @contextlib.contextmanager
    def on(stream: FakeStream) -> Iterator[None]:
        log.append(f"on {stream.name}")
        yield
        log.append(f"off {stream.name}")

    def to(self: Tensor, device: torch.device, *, non_blocking: bool) -> Tensor:
        log.append(f"copy {self.numel()} to {device}, non_blocking={non_blocking}")
        return self

    monkeypatch.setattr(device_prefetch, "_side_stream", lambda device: copying)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: computing)
    monkeypatch.setattr(Tensor, "is_pinned", lambda self: self.numel() == 1)
    monkeypatch.setattr(
        Tensor, "pin_memory", lambda self: log.append(f"pin {self.numel()}") or self
    )
    monkeypatch.setattr(Tensor, "to", to)
    monkeypatch.setattr(
        Tensor, "record_stream", lambda self, s: log.append(f"{self.numel()} used on {s.name}")
    )
    batches = prefetch_to_device(Source(2).batches, "cuda:0")
    next(batches)
    assert log == [
        "on copying",
        "copy 1 to cuda:0, non_blocking=True",
        "off copying",
        "copying records 1",
        "on copying",
        "pin 2",
        "copy 2 to cuda:0, non_blocking=True",
        "off copying",
        "copying records 2",
        "computing waits for 1",
        "1 used on computing",
    ]
    log.clear()
    next(batches)
    assert log == ["computing waits for 2", "2 used on computing"]

    log.clear()
    there = torch.ones(1)
    upload = device_prefetch._CudaUpload(torch.device("cuda:0"))
    upload.device = there.device
    batch, copied = upload.start([there, 5])
    assert upload.finish(batch, copied)[0] is there
    assert log == ["on copying", "off copying"]  # and nobody waits


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("depth", [1, 3])
def test_values_are_right_on_cuda_while_the_device_is_busy(pinned: bool, depth: int) -> None:
    """Each batch is read late, after long work on the computing stream, and memory is reused at once."""
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(1 << 18, generator=generator) for _ in range(20)]
    source = (batch.pin_memory() if pinned else batch for batch in batches)
    busy = torch.randn(2048, 2048, device="cuda")
    sums = []
    for batch in prefetch_to_device(source, "cuda", depth=depth):
        busy = (busy @ busy).clamp(-1, 1)
        sums.append(batch.double().sum())
        del batch
    expected = torch.stack([batch.double().sum() for batch in batches])
    torch.testing.assert_close(torch.stack(sums).cpu(), expected, rtol=1e-9, atol=1e-6)


@pytest.mark.gpu
@needs_cuda
def test_what_is_on_the_device_stays() -> None:
    there = [torch.ones(3, device="cuda") for _ in range(3)]
    got = list(prefetch_to_device([(x, x.cpu()) for x in there], "cuda"))
    assert all(mine is theirs for (mine, _), theirs in zip(got, there, strict=True))
    assert all(moved.device == there[0].device for _, moved in got)


@pytest.mark.gpu
@needs_cuda
def test_the_host_does_not_wait_for_the_device() -> None:
    batches = [torch.ones(1 << 22).pin_memory() for _ in range(6)]
    for batch in prefetch_to_device(batches, "cuda"):  # memory and kernels are there then
        batch.add_(1)
    torch.cuda.synchronize()
    start = time.perf_counter()
    torch.cuda._sleep(1 << 30)  # about half a second of the computing stream
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in prefetch_to_device(batches, "cuda"):
            batch.add_(1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    asked = time.perf_counter() - start
    torch.cuda.synchronize()
    assert asked < 0.5 * (time.perf_counter() - start)


@pytest.mark.gpu
@needs_cuda
def test_epochs_use_the_same_memory_again() -> None:
    batches = [torch.ones(1 << 22) for _ in range(4)]
    for epoch in range(30):
        list(prefetch_to_device(batches, "cuda"))
        torch.cuda.synchronize()  # only then is the memory of copies under way free again
        if epoch == 2:
            reserved = torch.cuda.memory_reserved()
    assert torch.cuda.memory_reserved() == reserved


@pytest.mark.parametrize("device", AHEAD)
def test_a_user_dict_is_moved(device: str) -> None:
    """BatchEncoding of Hugging Face is one."""
    (moved,) = prefetch_to_device([UserDict(x=torch.ones(2), y="a")], device)
    assert type(moved) is UserDict
    assert (moved["x"].device.type, moved["y"]) == (device, "a")
