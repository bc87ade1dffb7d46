"""Whole training steps on torch's meta device, which has shapes and types and no values.

There `.item()` and a branch on a tensor raise, and so does a tensor of another device: what passes here asks
a GPU for nothing between two log points, and mixes nothing. Each step leaves the same shapes, dtypes and
strides as on the CPU. What meta has not (streams, autocast, a generator of its own) is tested beside each
part, on fake CUDA tensors and in the tests marked `gpu`.
"""

import importlib
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flambeau.data.datasets.device_dataset import DeviceDataset
from flambeau.data.sources.open_data import open_sources
from flambeau.recipes.training.metrics import MeanOnDevice
from flambeau.run import run as run_module
from flambeau.run.loop.lifecycle import Lifecycle
from flambeau.trainer import fit as fit_module
from flambeau.trainer import loss as loss_module
from flambeau.trainer.fit import Training, fit, set_up
from flambeau.trainer.parts import data, model
from flambeau.trainer.parts.auto_settings import resolve
from flambeau.trainer.parts.data import Prepared
from flambeau.trainer.settings.settings import Settings
from flambeau.trainer.settings.stored_settings import with_preset

META = torch.device("meta")
LOG_EVERY = 4


def use_meta(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Let the device of a run be meta, which the setting refuses since nobody could train there.

    Returns:
        At which steps the run came to the three places where it reads the device, which do nothing now: the
        line of metrics.jsonl, a checkpoint, and the figures of an evaluation (there the number of samples).
    """
    for module in (fit_module, data, model):
        monkeypatch.setattr(module, "pick_device", lambda name: META)
    module = importlib.import_module("torch.optim.optimizer")
    kernels = module._get_fused_kernels_supported_devices
    monkeypatch.setattr(module, kernels.__name__, lambda: [*kernels(), "meta"])
    monkeypatch.setattr(data, "_HOLDING", {"meta"})
    read_at: dict[str, list[int]] = {"line": [], "save": [], "evaluation": []}
    monkeypatch.setattr(Lifecycle, "flush", lambda self: read_at["line"].append(self.state.step))
    monkeypatch.setattr(
        Lifecycle, "save", lambda self, **_: read_at["save"].append(self.state.step)
    )

    def evaluated(by_part: dict[int, dict[str, MeanOnDevice]], ranks: Any) -> dict[str, float]:
        (means,) = by_part.values()
        assert {mean.compute().device for mean in means.values()} == {META}
        read_at["evaluation"].append(means["val_loss"].num_samples)
        return {}

    monkeypatch.setattr(run_module, "gathered_means", evaluated)
    return read_at


def prepare(images: Path, folder: Path, *, replay: bool, **given: Any) -> Training:
    """A run on the CPU; or a replay from its first checkpoint, which writes nothing."""
    train, val = open_sources(images, seed=0)
    settings = Settings(
        **{"precision": "fp32", "batch_size": 2, **given,
           "data": str(images), "device": "cpu", "duration": "2ep", "log_every": LOG_EVERY}
    )  # fmt: skip
    resolved, facts = resolve(settings, train, val)
    start = folder / "checkpoints" / "step-00000000" if replay else None
    return set_up(
        Prepared(resolved, facts, train, val), folder=folder, bar=False, replay_from=start
    )


def steps(training: Training, number: int) -> list[Any]:
    """What so many micro-batches give and leave behind, as types."""
    run, seen = training.run, []
    next(run.epochs())
    for x, targets in itertools.islice(run.batches(), number):
        loss = training.loss_of(x, targets, step=run.state.step)
        run.log(seen=loss, of_each=targets, number=1.0)
        run.step(loss)
        state = run.state
        seen.append(types_of((x, targets, loss)))
        seen.append(types_of([*run.model.state_dict().values()]))
        seen.append(types_of([v for s in run.optimizer.state.values() for v in s.values()]))
        seen.append(types_of([*state.ema.shadow.values()] if state.ema else []))
        seen.append(types_of(state.window.losses))
        seen.append(types_of([mean.sums() for mean in state.window.logged.values()]))
    return seen


class FusedKernels(TorchDispatchMode):
    """The kernels of fused optimizers, which write in place and which meta lacks: here they write nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.startswith("aten::_fused_"):
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            assert {t.device.type for t in tensors} == {"meta"}, func
            return None
        return func(*args, **(kwargs or {}))


def types_of(tensors: Any) -> list[Any]:
    return [(t.shape, t.dtype, t.stride()) for t in tensors if isinstance(t, Tensor)]


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {
        "mixup": 0.2, "cutmix": 1.0, "random_erasing": 0.5, "label_smoothing": 0.1, "ema": 0.99,
        "clip_norm": 1.0, "accumulate": 2,
    },
    "adamw": {"optimizer": "adamw", "ema": 0.9, "cutmix": 1.0},
    "muon": {"optimizer": "muon", "clip_norm": 1.0},
    "fp16": {"precision": "fp16", "clip_norm": 1.0, "ema": 0.9, "mixup": 0.2},
    "bf16": {"precision": "bf16", "accumulate": 2},
    "recompute": {"recompute": "stages.*"},
    "speedrun": {**with_preset({"preset": "speedrun"}), "precision": "fp32", "batch_size": 2},
}  # fmt: skip


pytestmark = pytest.mark.filterwarnings("ignore:for .*copying from a non-meta parameter")


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_steps(
    make_images: Callable[..., Path],
    tmp_path: Path,
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    images = tmp_path / "images"
    for part in ("train", "val"):
        make_images(images / part, size=16 if "preset" in settings else 8)
    # Meta has no autocast; the scaled backward pass and the step of each precision are here all the same.
    monkeypatch.setattr(loss_module, "autocast", lambda device, precision: nullcontext())
    on_cpu = steps(prepare(images, tmp_path / "run", replay=False, **settings), 3)
    use_meta(monkeypatch)
    training = prepare(images, tmp_path / "run", replay=True, **settings)
    assert isinstance(training.train, DeviceDataset)
    with FusedKernels():
        assert steps(training, 3) == on_cpu


def test_the_whole_loop_reads_at_three_places_only(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = prepare(images, tmp_path / "run", replay=False, ema=0.9).run
    next(run.epochs())
    run.close()
    read_at = use_meta(monkeypatch)
    training = prepare(images, tmp_path / "run", replay=True, ema=0.9)
    assert isinstance(training.val, DeviceDataset)
    with FusedKernels():
        fit(training)
    assert training.run.state.step == 16
    assert read_at == {"line": [4, 8, 12, 16], "save": [0, 8, 16], "evaluation": [8, 8]}
