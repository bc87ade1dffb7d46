"""What tells one run from another, in words that config.toml can hold and a person can compare."""

import hashlib

from torch.optim import Optimizer

from flambeau.data.loading.loader import Order


def identity_of_sampler(sampler: Order) -> str:
    """Its class and a digest of its first epoch."""
    digest = hashlib.sha256(sampler.order(0).numpy().tobytes()).hexdigest()
    return f"{type(sampler).__name__}, {len(sampler)} samples, {digest[:16]}"


def identity_of_optimizer(optimizer: Optimizer) -> str:
    """The class and the settings that decide what a step does, as they are before the first one."""
    group = {**optimizer.param_groups[0], "lr": optimizer.param_groups[0]["initial_lr"]}
    named = ("lr", "momentum", "nesterov", "betas", "alpha", "weight_decay")
    settings = ", ".join(f"{name}={group[name]}" for name in named if name in group)
    return f"{type(optimizer).__name__}({settings})"
