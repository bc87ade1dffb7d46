"""The optimizers of `flambeau train`, with suitable defaults and kernels."""

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn, optim
from torch.optim import Optimizer

from flambeau.errors import InputError
from flambeau.recipes.training.muon import Muon, hidden_matrices
from flambeau.trainer.settings.settings import MOMENTUM

# At a batch of 256. sgd: He et al., CVPR 2016, section 3.4. The others: near torch's defaults, chosen.
BASE_LR = {
    "sgd": 0.1,
    "adam": 1e-3,
    "adamw": 1e-3,
    "nadam": 1e-3,
    "radam": 1e-3,
    "adamax": 2e-3,
    "adagrad": 1e-2,
    "rmsprop": 1e-3,
    "muon": 2e-3,
}
_LR_OF_MODEL = {
    "resnet18": {"sgd": 0.4},
    "small_convnet": {"sgd": 0.4, "muon": 8e-3},
    "tiny_convnet": {"sgd": 1.6, "muon": 8e-3},
}
"""Exceptions. Of resnet18 see docs/en/learning_rate.md. On the embedded data and small_convnet muon had 90.3,
91.1 and 90.4 % with a quarter, half and 1.25 times of this at a batch of 128 (16 epochs, seed 0), sgd 90.5 %.
With tiny_convnet sgd had 89.0, 89.5, 90.0 and 89.7 % with a quarter, half, once and twice this at a batch of
64 (5 epochs, 3 seeds)."""
_LARGEST_LR = {"resnet18": {"sgd": 0.8}, "tiny_convnet": {"sgd": 0.8}}
"""Where the rate stops growing with the batch; of resnet18 chosen. val_accuracy of tiny_convnet on the
embedded data after 4 epochs, seeds 0 and 1, one thread of a CPU: at a batch of 256 79.3 and 83.0 % with 0.8,
81.9 and 76.4 % with 1.6; at 512 75.9 and 75.7 % with 0.8, 44.8 and 59.6 % with 3.2; at 1024 val_loss was
56.4 and 10.7 with 6.4, 1.85 with 0.8 (seed 0)."""
_PLAIN: dict[str, Callable[..., Optimizer]] = {
    "nadam": optim.NAdam,
    "radam": optim.RAdam,
    "adamax": optim.Adamax,
    "rmsprop": optim.RMSprop,
}


_KEPT_FROM_COMPILER = "add_param_group", "load_state_dict", "state_dict", "zero_grad"


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """Meanwhile no optimizer imports torch.compile, which takes 2 s of a processor's time at the start.

    torch wraps methods to keep the compiler out of them, and imports it to do so.
    """
    wrapped = {name: vars(Optimizer)[name] for name in _KEPT_FROM_COMPILER}
    for name, method in wrapped.items():
        setattr(Optimizer, name, inspect.unwrap(method))
    try:
        yield
    finally:
        for name, method in wrapped.items():
            setattr(Optimizer, name, method)


def usual_lr(optimizer: str, model: str) -> tuple[float, float]:
    """The learning rate of an optimizer at a batch of 256, and the largest at any; `model` is its name."""
    name = model.partition(".")[0]  # without the suffix of published weights
    rate = _LR_OF_MODEL.get(name, {}).get(optimizer, BASE_LR[optimizer])
    return rate, _LARGEST_LR.get(name, {}).get(optimizer, math.inf)


def new_optimizer(
    name: str,
    model: nn.Module,
    groups: list[dict[str, Any]],
    *,
    lr: float,
    momentum: float | None = None,
    betas: tuple[float, float] | None = None,
    fixed_norm: bool = False,
) -> Optimizer:
    """Make an optimizer of groups with `weight_decay`, and `lr` where it differs.

    `momentum` is for those of MOMENTUM, `betas` for BETAS, `fixed_norm` for muon; None: the default.
    """
    momentum = MOMENTUM.get(name) if momentum is None else momentum
    if name == "sgd":
        assert momentum is not None
        return optim.SGD(groups, lr=lr, momentum=momentum, nesterov=momentum > 0, fused=True)
    if name in ("adam", "adamw"):
        kind = optim.Adam if name == "adam" else optim.AdamW
        return kind(groups, lr=lr, betas=betas or (0.9, 0.999), fused=True)
    if name == "muon":
        matrices = hidden_matrices(model)
        if not matrices:
            raise InputError(
                "optimizer = 'muon' is for weight matrices between the first and the last layer, and this "
                "model has none that is trained: use adamw"
            )
        assert momentum is not None
        return Muon(groups, matrices=matrices, lr=lr, momentum=momentum, fixed_norm=fixed_norm)
    device = groups[0]["params"][0].device
    if name == "adagrad":
        return optim.Adagrad(groups, lr=lr, fused=device.type == "cpu")
    extra: dict[str, Any] = {"momentum": momentum} if name == "rmsprop" else {}
    if betas is not None:
        extra["betas"] = betas
    # Capturable: with the step count on the GPU, undoing a step that was not finite never waits.
    return _PLAIN[name](groups, lr=lr, capturable=device.type == "cuda", **extra)
