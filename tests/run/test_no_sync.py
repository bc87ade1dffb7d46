"""No step between two log points asks the device for a value.

On a GPU every such question makes the host wait. The count here holds on any device: it sees the Python
methods and, below them, the operators that all of them end in.
"""

import collections
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flambeau.data.loading.micro_batch import MicroBatch
from flambeau.data.sources.open_data import open_sources
from flambeau.recipes.data.recordio import IRHeader, RecordWriter, pack
from flambeau.run.loop.lifecycle import Lifecycle
from flambeau.run.loop.step_metrics import StepMetrics, add_value
from flambeau.trainer.fit import Training, set_up
from flambeau.trainer.parts.auto_settings import resolve
from flambeau.trainer.parts.data import Prepared
from flambeau.trainer.settings.settings import Settings

METHODS = (
    "item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__", "__array__",
    "__format__", "nonzero", "is_nonzero", "equal", "allclose", "unique", "masked_select", "__contains__",
)  # fmt: skip
OPERATORS = {
    "_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select", "_unique2", "unique_dim",
    "item", "repeat_interleave", "allclose", "bincount", "histc", "_assert_async",
}  # fmt: skip
_LOG_EVERY = 10


class Counted(TorchDispatchMode):
    """Counts the operators that need a value on the host."""

    def __init__(self, seen: collections.Counter[str]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in OPERATORS:
            self._seen[name] += 1
        # Indexing by a mask looks for its size; a copy to another device waits unless it is told not to.
        if name in ("index", "index_put", "index_put_") and any(
            i is not None and i.dtype is torch.bool for i in args[1]
        ):
            self._seen["index by a mask"] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[collections.Counter[str]]:
    seen: collections.Counter[str] = collections.Counter()

    def counted(name: str, method: Any) -> Any:
        def call(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            seen[f"Tensor.{name}"] += 1
            return method(self, *args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for name in METHODS:
            if hasattr(Tensor, name):
                patch.setattr(Tensor, name, counted(name, getattr(Tensor, name)))
        with Counted(seen):
            yield seen


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """240 small grey images of three classes in a record file."""
    path, draw = tmp_path_factory.mktemp("data") / "small.rec", np.random.default_rng(0)
    with RecordWriter(path) as writer:
        for index in range(240):
            file = io.BytesIO()
            Image.fromarray(draw.integers(0, 256, (16, 16), dtype=np.uint8)).save(file, "png")
            writer.write(pack(IRHeader(0, index % 3, index, 0), file.getvalue()))
    return path


def prepare(images: Path, folder: Path, **given: Any) -> Training:
    train, val = open_sources(images, seed=0)
    settings = Settings(**{"data": str(images), "precision": "fp32", "batch_size": 4, **given})
    resolved, facts = resolve(settings, train, val)
    return set_up(Prepared(resolved, facts, train, val), folder=folder, bar=False)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {
            "mixup": 0.2,
            "cutmix": 1.0,
            "label_smoothing": 0.1,
            "ema": 0.99,
            "clip_norm": 1.0,
            "accumulate": 2,
        },
        {"optimizer": "adamw", "precision": "bf16", "ema": 0.9, "mixup": 0.2},
        {"optimizer": "adam", "precision": "fp16", "clip_norm": 1.0},
    ],
    ids=["plain", "everything", "bf16", "fp16"],
)
def test_no_step_waits(
    tmp_path: Path, images: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    training = prepare(images, tmp_path / "run", duration="25st", log_every=_LOG_EVERY, **settings)
    run, events = training.run, dict[int, dict[str, int]]()
    original = Lifecycle._at_event

    def counted_event(self: Lifecycle, micro: MicroBatch) -> None:
        with counting(monkeypatch) as seen:
            original(self, micro)
        events[self.state.step] = dict(seen)

    monkeypatch.setattr(Lifecycle, "_at_event", counted_event)
    epochs = run.epochs()
    next(epochs)
    batches = iter(run.batches())
    x, y = next(batches)  # the first one opens the stream
    while run.state.step < 24:
        step = run.state.step
        with counting(monkeypatch) as seen:
            run.step(training.loss_of(x, y, step=step))
        assert dict(seen) == {}, f"step {step}"
        # The data come from a queue of ready batches where they are read by workers; here they are made in
        # this process, from NumPy arrays and lists on the host, which is not counted.
        x, y = next(batches)
    assert events.pop(1) == {}  # waits for a file: the first checkpoint
    assert list(events) == [10, 20]
    assert all(events.values())  # the count does count
    run.close()


def test_reading_a_batch_asks_nothing_either(
    tmp_path: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`batches` itself, with data from a worker process, as on a GPU machine."""
    training = prepare(images, tmp_path / "run", duration="9st", workers=1)
    run = training.run
    next(run.epochs())
    batches = iter(run.batches())
    x, y = next(batches)
    for _ in range(6):
        with counting(monkeypatch) as seen:
            run.step(training.loss_of(x, y, step=run.state.step))
            x, y = next(batches)
        assert seen == {}
    run.close()


def test_a_line_costs_one_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    window = StepMetrics(torch.device("cpu"))
    for size in (3, 4):
        window.add_loss(torch.tensor(float(size)), size)
        add_value(window.logged, "a", torch.ones(size), size, window.device)
        add_value(window.logged, "b", 0.5, size, window.device)
    with counting(monkeypatch) as seen:
        row, halted = window.read(torch.tensor(2.0))
    assert (row["train_loss"], row["a"], row["b"], halted) == (25 / 7, 1.0, 0.5, 2)
    assert seen["Tensor.tolist"] == 1
    assert sum(count for name, count in seen.items() if name.startswith("Tensor.")) == 1
