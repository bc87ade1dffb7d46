"""What tells one run from another, and what must be equal for a resume to give the same bits.

A run is identified by values that config.toml can hold and a person can compare: the settings of
`flambeau train`, or the options of `Run` with the user's `config` in a table of its own.
Where `differences` finds any, `RunFolder.check_same` refuses the resume.
"""

import dataclasses
import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from flambeau.data.loading.batch_plan import Order
from flambeau.train.settings.run_options import RunOptions
from flambeau.train.settings.settings import FIELDS

_OBJECTS = {  # of RunOptions: not values that a file can hold, or not of the run
    "sampler", "schedule", "collate", "state", "on_bad", "explain", "config", "settings",
    "attachments", "bar", "track", "metrics", "replay_from", "micro_batch",
}  # fmt: skip
_NOT_GIVEN = "not given"
_SINCE_0_2 = {"best", "best_mode", "param_groups"}  # what config.toml of 0.1 does not hold
_OF_GROUPS = (
    "lr", "momentum", "dampening", "nesterov", "betas", "alpha", "rho", "eps", "weight_decay", "amsgrad",
    "maximize",
)  # fmt: skip


def identity(options: RunOptions, optimizer: Optimizer, *, schedule: str) -> dict[str, Any]:
    """What config.toml holds of a run.

    Args:
        options: of the run.
        optimizer: whose groups know their `initial_lr`.
        schedule: the name of the schedule.
    """
    if options.settings is not None:
        return dict(options.settings)
    values = {
        option.name: getattr(options, option.name)
        for option in dataclasses.fields(options)
        if option.name not in _OBJECTS
    }
    groups = optimizer.param_groups
    kind = type(optimizer).__name__
    first = _group_settings(
        groups[0], ("lr", "momentum", "nesterov", "betas", "alpha", "weight_decay")
    )
    values |= {"optimizer": f"{kind}({first})", "schedule": schedule}
    values["param_groups"] = [_group_settings(group, _OF_GROUPS) for group in groups]
    if options.sampler is not None:
        values["sampler"] = _sampler(options.sampler)
    return {**values, "config": {k: v for k, v in (options.config or {}).items() if v is not None}}


def _sampler(sampler: Order) -> str:
    """Its class and a digest of its first epoch."""
    digest = hashlib.sha256(sampler.order(0).numpy().tobytes()).hexdigest()
    return f"{type(sampler).__name__}, {len(sampler)} samples, {digest[:16]}"


def _group_settings(group: Mapping[str, Any], names: Sequence[str]) -> str:
    """The settings of a parameter group that decide what a step does, as they are before the first one."""
    told = {**group, "lr": group["initial_lr"]}
    return ", ".join(f"{name}={told[name]}" for name in names if name in told)


def differences(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """What keeps `wanted` from resuming a run of `stored`, as 'name: X there, Y now'."""
    if "config" in wanted:
        stored = _with_table(stored, wanted)
    found = []
    for name in sorted({*stored, *wanted}):
        field = FIELDS.get(name)
        if field is not None and field.metadata["neutral"]:
            continue
        if name == "config":
            found += _in_table(stored[name], wanted[name])
            continue
        if name == "param_groups" and name in stored and name in wanted:
            found += _in_groups(stored[name], wanted[name])
            continue
        if name == "optimizer" and "param_groups" in stored and "param_groups" in wanted:
            kinds = [str(values.get(name)).split("(")[0] for values in (stored, wanted)]
            if kinds[0] != kinds[1]:
                found.append(f"optimizer: {kinds[0]} there, {kinds[1]} now")
            continue  # its settings are those of the first group
        # What an older version did not know was as it is by default.
        there = stored.get(name, None if field is None else field.default)
        if there != wanted.get(name) and not (name in _SINCE_0_2 and name not in stored):
            texts = [
                _shown(value, is_flag=field is not None) for value in (there, wanted.get(name))
            ]
            found.append(f"{name}: {texts[0]} there, {texts[1]} now")
    return found


def _shown(value: object, *, is_flag: bool = False) -> str:
    """A value in a message; of a flag that has none, what its help says."""
    if value is None:
        return _NOT_GIVEN
    return ("no", "yes")[value] if is_flag and isinstance(value, bool) else repr(value)


def _in_groups(stored: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """What differs between parameter groups, one by one; each is 'name=value, name=value'."""
    if len(stored) != len(wanted):
        return [f"parameter groups: {len(stored)} there, {len(wanted)} now"]
    found = []
    for number, texts in enumerate(zip(stored, wanted, strict=True)):
        there, now = (
            dict(pair.split("=", 1) for pair in re.split(r", (?=\w+=)", text)) for text in texts
        )
        of_group = f" of parameter group {number}" if len(stored) > 1 else ""
        found += [
            f"{name}{of_group}: {there.get(name, _NOT_GIVEN)} there, {now.get(name, _NOT_GIVEN)} now"
            for name in {**there, **now}
            if there.get(name) != now.get(name)
        ]
    return found


def _with_table(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> Mapping[str, Any]:
    """As it is now written: version 0.1 mixed the user's `config` with the options."""
    if isinstance(stored.get("config"), dict):
        return stored
    options = {*wanted, *(option.name for option in dataclasses.fields(RunOptions))} - {"config"}
    mine = {name: value for name, value in stored.items() if name not in options}
    rest = {name: value for name, value in stored.items() if name in options}
    return {**rest, "config": mine}


def _in_table(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    return [
        f"config {name}: {_shown(stored.get(name))} there, {_shown(wanted.get(name))} now"
        for name in sorted({*stored, *wanted})
        if name not in stored or name not in wanted or stored[name] != wanted[name]
    ]


POWERSGD_FORGETS = "PowerSGD's errors, which each process carries from step to step, start at zero"


def exactness_facts(device: torch.device, *, compiled: bool) -> dict[str, Any]:
    """The parts of the machine and its libraries that decide how floating-point sums are rounded.

    Args:
        device: of the run.
        compiled: the model is torch.compile's.
    """
    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "device": device.type,
        "threads": torch.get_num_threads(),
        "cpu_kernels": torch.backends.cpu.get_cpu_capability(),
    }
    if compiled:
        facts["compiled"] = "yes"
    if device.type == "cuda":
        facts["device_name"] = torch.cuda.get_device_name(device)
    return facts


def changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs, as 'torch 2.14.0 then, 2.15.0 now'."""
    return [
        f"{name} {then.get(name, 'no')} then, {now.get(name, 'no')} now"
        for name in sorted({*then, *now})
        if then.get(name) != now.get(name)
    ]
