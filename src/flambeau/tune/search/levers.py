"""What can be set for speed: of `flambeau train` by its flags, of any script from outside."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from flambeau.recipes.setup.environment import default_device, native_bf16, usable_cpus

Choice = Mapping[str, str]
"""Levers that are set, by name, with their values; what is not in it is as the user has it."""


@dataclass(frozen=True)
class Setting:
    """One position of a lever.

    Attributes:
        value: as the user reads it.
        words: flags of `flambeau train`.
        change: of a script, see `watch/changes.py`.
        environment: variables.
    """

    value: str
    words: tuple[str, ...] = ()
    change: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Lever:
    """Something that can be set in several ways.

    Attributes:
        name: of the setting of `flambeau train`, or in words.
        settings: to be tried, in order; one that is slower than the one before it ends the list.
        is_rounding: results differ by more than rounding of float32, so the loss is looked at.
        costs_start: the run takes longer until its first step, which has to pay for itself.
    """

    name: str
    settings: tuple[Setting, ...]
    is_rounding: bool = False
    costs_start: bool = False

    def setting(self, value: str) -> Setting:
        """The position of this value."""
        return next(one for one in self.settings if one.value == value)


def levers_of_train(given: Sequence[str], *, objective: str, device: torch.device) -> list[Lever]:
    """Levers of `flambeau train` that the user has not set.

    Args:
        given: the arguments of train.
        objective: throughput or memory.
        device: of the run.
    """
    free = [one for one in _all_of_train(objective, device) if not _is_given(one.name, given)]
    return [one for one in free if one.settings]


def _all_of_train(objective: str, device: torch.device) -> list[Lever]:
    def flags(name: str, *values: str) -> tuple[Setting, ...]:
        return tuple(Setting(value, words=(f"--{name}", value)) for value in values)

    # `auto` takes bf16 where that is native, else fp16 on a GPU and fp32 on a CPU.
    others = {"cuda": ["tf32", "fp16"]} if native_bf16(device) else {"cuda": ["fp32"]}
    values = others.get(device.type, ["fp32"] if native_bf16(device) else [])
    rounding = Lever("precision", flags("precision", *values), is_rounding=True)
    if objective == "memory":
        return [
            rounding,
            Lever("recompute", flags("recompute", "*")),
        ]
    found = [
        Lever("workers", flags("workers", *_worker_counts())),
        Lever("threads", _threads(device)),
        rounding,
    ]
    if device.type == "cuda" or shutil.which("g++"):
        found.append(Lever("compile", flags("compile", "default"), costs_start=True))
    return found


def levers_of_script(device: torch.device) -> list[Lever]:
    """What can be changed in any script from outside.

    Args:
        device: that the script is expected to use.
    """
    precisions = {"bf16": "bfloat16", "fp16": "float16"}
    rounding = tuple(
        Setting(name, change={"tf32": True} if name == "tf32" else {"autocast": precisions[name]})
        for name in _precisions(device)
        if name != "fp16"  # which needs a scaler in the script
    )
    found = [
        Lever("workers", tuple(Setting(n, change={"workers": int(n)}) for n in _worker_counts())),
        Lever("persistent workers", (Setting("yes", change={"persistent": True}),)),
        Lever("threads", _threads(device)),
        Lever("fused optimizer", (Setting("yes", change={"fused": True}),)),
        Lever("channels_last", (Setting("yes", change={"channels_last": True}),)),
        Lever("precision", rounding, is_rounding=True),
    ]
    if device.type == "cuda" or shutil.which("g++"):
        compiled = Setting("yes", change={"compile": True})
        found.append(Lever("compile", (compiled,), costs_start=True))
    return [one for one in found if one.settings]


def default_place() -> torch.device:
    """Where a training runs that names no device."""
    return default_device()


def _precisions(device: torch.device) -> list[str]:
    if device.type == "cuda":
        return ["tf32", "bf16", "fp16"] if native_bf16(device) else ["fp16"]
    return ["bf16"] if native_bf16(device) else []


def _worker_counts() -> list[str]:
    """0, and powers of two up to twice the CPUs."""
    counts = [0]
    while (count := max(1, 2 * counts[-1])) <= 2 * usable_cpus():
        counts.append(count)
    return [f"{count}" for count in counts]


def _threads(device: torch.device) -> tuple[Setting, ...]:
    """Fewer threads for the model leave CPUs to the workers; on a GPU the model needs none."""
    cpus = usable_cpus()
    if device.type != "cpu" or cpus < 2:
        return ()
    return tuple(
        Setting(f"{count}", environment={"OMP_NUM_THREADS": f"{count}"}, change={"threads": count})
        for count in dict.fromkeys((cpus - 1, max(1, cpus // 2)))
    )


def _is_given(name: str, given: Sequence[str]) -> bool:
    flag = "--" + name.replace("_", "-")
    return any(word == flag or word.startswith(f"{flag}=") for word in given)
