"""What distinguishes one run from another, in words that config.toml can hold and a person can compare."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from flambeau.data.loading.batch_plan import Order


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


POWERSGD_FORGETS = "PowerSGD's errors, which each process carries from step to step, start at zero"


def exactness_facts(device: torch.device) -> dict[str, Any]:
    """The parts of the machine and its libraries that decide how floating-point sums are rounded."""
    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "device": device.type,
        "threads": torch.get_num_threads(),
        "cpu_kernels": torch.backends.cpu.get_cpu_capability(),
    }
    if device.type == "cuda":
        facts["device_name"] = torch.cuda.get_device_name(device)
    return facts


def changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs, as 'torch 2.14.0 then, 2.15.0 now'."""
    return [
        f"{name} {then.get(name)} then, {now.get(name)} now"
        for name in sorted({*then, *now})
        if then.get(name) != now.get(name)
    ]
