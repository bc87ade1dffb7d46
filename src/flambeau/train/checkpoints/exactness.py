"""What must be equal for a resume to give the same bits, besides the checkpoint itself."""

from collections.abc import Mapping
from typing import Any

import torch

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
