"""Recipes on fake CUDA tensors, which have a device, shapes and types, and no values.

They raise at `.item()`, at `nonzero`, at a branch on a tensor and at an operation across devices, so that
what passes here makes no step wait for the GPU. Shapes, dtypes and strides are those of the CPU. Backward
needs a GPU, so gradients are made by hand; whole steps, mixup and cutmix (whose generators cannot be faked)
are in tests/run/test_meta_device.py.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flambeau.recipes.data.batch_crop_flip import batch_crop_flip
from flambeau.recipes.data.random_erasing import random_erasing
from flambeau.recipes.data.sample_order import sample_seeds
from flambeau.recipes.memory.activation_checkpointing import checkpoint_modules
from flambeau.recipes.training.amp_step import AmpStep
from flambeau.recipes.training.distillation import distillation_loss
from flambeau.recipes.training.ema import EMA
from flambeau.recipes.training.label_smoothing import cross_entropy
from flambeau.recipes.training.metrics import MeanOnDevice, confusion, correct
from flambeau.recipes.training.muon import Muon, hidden_matrices

N, C, SIDE, CLASSES = 4, 3, 16, 5


class FusedKernels(TorchDispatchMode):
    """The kernels of fused optimizers write in place, and some cannot be faked: here they write nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.startswith("aten::_fused_"):
            devices = {t.device for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
            assert len(devices) == 1, devices
            return None
        return func(*args, **(kwargs or {}))


def fake_cuda(work: Callable[[str], Any]) -> Any:
    with FusedKernels(), FakeTensorMode():
        return work("cuda")


def types_of(result: Any, device: str) -> list[Any]:
    tensors = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
    assert tensors
    assert {t.device.type for t in tensors} == {device}
    return [(t.shape, t.dtype, t.stride()) for t in tensors]


def images(device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.zeros(N, C, SIDE, SIDE, dtype=dtype, device=device)
    return x.to(memory_format=torch.channels_last)


def targets(device: str) -> Tensor:
    return torch.zeros(N, dtype=torch.int64, device=device)


def network(device: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.device(device):
        return nn.Sequential(
            nn.Conv2d(C, 8, 3, padding=1, dtype=dtype), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1, dtype=dtype), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(8, CLASSES, dtype=dtype),
        )  # fmt: skip


AUGMENTATIONS: dict[str, Callable[[str], Any]] = {
    "batch_crop_flip": lambda on: batch_crop_flip(
        images(on, torch.uint8), targets(on), padding=2, cutout=5
    ),
    "batch_crop_flip, constant": lambda on: batch_crop_flip(
        images(on), targets(on), padding=2, border="constant", value=0.5
    ),
    "random_erasing": lambda on: random_erasing(images(on), seeds=targets(on)),
    "random_erasing, mean": lambda on: random_erasing(
        images(on), seeds=targets(on), value=torch.zeros(C, device=on)
    ),
    "random_erasing, noise": lambda on: random_erasing(
        images(on), seeds=targets(on), value="random"
    ),
    "sample_seeds": lambda on: sample_seeds(targets(on), seed=1, epoch=2),
    "correct": lambda on: correct(torch.zeros(N, CLASSES, device=on), targets(on)),
    "correct, k": lambda on: correct(torch.zeros(N, CLASSES, device=on), targets(on), k=2),
    "confusion": lambda on: confusion(
        torch.zeros(N, CLASSES, device=on), targets(on), num_classes=CLASSES
    ),
    "cross_entropy": lambda on: cross_entropy(
        torch.zeros(N, CLASSES, device=on), targets(on), smoothing=0.1
    ),
    "distillation_loss": lambda on: distillation_loss(
        torch.zeros(N, CLASSES, device=on), torch.zeros(N, CLASSES, device=on), temperature=2.0
    ),
}


@pytest.mark.parametrize("work", AUGMENTATIONS.values(), ids=AUGMENTATIONS)
def test_functions(work: Callable[[str], Any]) -> None:
    assert types_of(fake_cuda(work), "cuda") == types_of(work("cpu"), "cpu")


def as_it_is(work: Callable[[], object], tensors: object, settings: object) -> None:
    """In place of GraphReplay, which needs a GPU."""
    work()


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, fused=True),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), fused=True),
    "sgd, not fused": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "rmsprop": lambda m: torch.optim.RMSprop(
        m.parameters(), capturable=next(m.parameters()).is_cuda
    ),
    "muon": lambda m: Muon(m.parameters(), matrices=hidden_matrices(m)),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_forward_and_optimizer_steps(make: Any, precision: Any) -> None:
    """Two, since the first one makes the optimizer's state."""

    def work(on: str) -> Any:
        model = network(on)
        optimizer, ema, mean = make(model), EMA(model, decay=0.9), MeanOnDevice(on)
        amp = AmpStep(
            optimizer, precision=precision, max_norm=1.0, halt=True, replay=lambda device: as_it_is
        )
        left = []
        for _ in range(2):
            logits = model(images(on))  # autocast turns itself off where there is no GPU
            loss = cross_entropy(logits, targets(on)).detach()
            mean.update(loss, N)
            mean.update(correct(logits, targets(on)))
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            amp.step(watch=[loss])
            ema.update()
            state = [s for _, s in sorted(optimizer.state_dict()["state"].items())]
            left += [loss, state, ema.shadow, mean.sums(), amp.halted, amp.skipped, amp.norm]
            left += [amp.scale, [*model.parameters()], [*model.buffers()]]
        return left

    assert types_of(fake_cuda(work), "cuda") == types_of(work("cpu"), "cpu")


def test_a_step_that_is_watched_reads_the_same_rate_as_a_replay() -> None:
    """A hook sees every step; the rate is float32 on the device, as in the steps before it."""

    def work(on: str) -> Any:
        model = network(on)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        replays = []
        rates = []

        def replay(work: Callable[[], object], tensors: object, settings: object) -> None:
            replays.append(optimizer.param_groups[0]["lr"])
            work()

        amp = AmpStep(optimizer, replay=lambda device: replay)
        for step in range(4):
            if step == 2:
                optimizer.register_step_post_hook(
                    lambda o, *_: rates.append(o.param_groups[0]["lr"])
                )
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            amp.step()
            assert optimizer.param_groups[0]["lr"] == 0.1
        assert len(replays) == len(rates) == 2
        return [*replays, *rates]

    assert {(t.dtype, t.device.type) for t in fake_cuda(work)} == {(torch.float32, "cuda")}


def test_recomputing_forward() -> None:
    def work(on: str) -> Any:
        return checkpoint_modules(network(on), "0", "3")(images(on))

    assert types_of(fake_cuda(work), "cuda") == types_of(work("cpu"), "cpu")


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda t: t.sum().item(),
    "branch": lambda t: bool(t.any()),
    "nonzero": lambda t: t.nonzero(),
    "mask": lambda t: t[t > 0],
    "two devices": lambda t: t + torch.zeros(3, device="cpu"),
}


@pytest.mark.parametrize("work", REFUSED.values(), ids=REFUSED)
def test_what_waits_is_refused(work: Callable[[Tensor], Any]) -> None:
    """The instrument itself."""
    with pytest.raises(Exception, match=r"(?i)data.dependent|_local_scalar|nonzero|device"):
        fake_cuda(lambda on: work(torch.zeros(3, device=on)))
