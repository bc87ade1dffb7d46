"""What identifies a run, and what must be equal for a resume to give the same bits.

The identity is what config.toml holds: the settings of `flambeau train`, or the options of `Run` with the
user's `config` in a table of its own. `RunFolder.check_same` refuses a resume where `differences` finds any.
"""

import dataclasses
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from flambeau.data.loading.batch_plan import Order
from flambeau.run.options.option import options_of, values_of
from flambeau.run.options.portable_bits import switches_set
from flambeau.run.options.run_options import RunOptions
from flambeau.run.options.shared_options import SharedOptions

_LEFT_OUT = {  # options that no file can hold, or that do not identify a run
    "sampler",
    "schedule",
    "collate",
    "state",
    "on_bad",
    "explain",
    "config",
    "builder",
    "preprocess",
    "classes",
    "settings",
    "advice",
    "attachments",
    "bar",
    "track",
    "metrics",
    "replay_from",
    "micro_batch",
}
_BESIDE = {"builder_sha256"}  # what config.toml says besides options, and a resume may change
_NOT_GIVEN = "not given"
_GROUP_SETTINGS = (
    "lr",
    "momentum",
    "dampening",
    "nesterov",
    "betas",
    "alpha",
    "rho",
    "eps",
    "weight_decay",
    "amsgrad",
    "maximize",
)


@dataclass(frozen=True)
class Identity:
    """What identifies a run: values by name, as config.toml holds them.

    `declared`: the options among them, which say what a resume may change.
    """

    values: Mapping[str, Any]
    declared: Mapping[str, dataclasses.Field[Any]]

    @classmethod
    def of(
        cls,
        options: RunOptions,
        optimizer: Optimizer,
        *,
        schedule: str,
        use: Mapping[str, Any] = {},
    ) -> "Identity":
        """The identity of a run, whose optimizer's groups have `initial_lr`.

        `use`: how the model is made and used, no part of the identity.
        """
        if isinstance(options.settings, SharedOptions):
            return cls(values_of(options.settings), options_of(type(options.settings)))
        declared = options_of(RunOptions)
        if options.settings is not None:
            return cls({**options.settings, **use}, declared)
        values = {name: getattr(options, name) for name in declared if name not in _LEFT_OUT}
        groups = optimizer.param_groups
        kind = type(optimizer).__name__
        first = _group_settings(
            groups[0], ("lr", "momentum", "nesterov", "betas", "alpha", "weight_decay")
        )
        values |= {"optimizer": f"{kind}({first})", "schedule": schedule}
        values["param_groups"] = [_group_settings(group, _GROUP_SETTINGS) for group in groups]
        if options.sampler is not None:
            values["sampler"] = _sampler(options.sampler)
        config = {k: v for k, v in (options.config or {}).items() if v is not None}
        return cls({**values, **use, "config": config}, declared)


def _sampler(sampler: Order) -> str:
    digest = hashlib.sha256(sampler.order(0).long().numpy().tobytes()).hexdigest()
    return f"{type(sampler).__name__}, {len(sampler)} samples, {digest[:16]}"


def _group_settings(group: Mapping[str, Any], names: Sequence[str]) -> str:
    """The settings of a parameter group that affect a step, with the initial learning rate."""
    values = {**group, "lr": group["initial_lr"]}
    return ", ".join(f"{name}={values[name]}" for name in names if name in values)


def differences(stored: Mapping[str, Any], wanted: Identity) -> list[str]:
    """What prevents resuming a run of `stored`, as 'name: X there, Y now'."""
    texts = list[str]()
    for name in sorted({*stored, *wanted.values}):
        option = wanted.declared.get(name)
        if name in _BESIDE or (option is not None and option.metadata["may_change"]):
            continue
        pair: tuple[Any, Any] = (stored.get(name), wanted.values.get(name))
        is_in_both = name in stored and name in wanted.values
        if name == "config" and is_in_both:
            texts += _table_differences(*pair)
        elif name == "param_groups" and is_in_both:
            texts += _group_differences(*pair)
        elif name == "optimizer" and "param_groups" in stored and "param_groups" in wanted.values:
            kinds = [str(value).split("(")[0] for value in pair]
            if kinds[0] != kinds[1]:
                texts.append(f"optimizer: {kinds[0]} there, {kinds[1]} now")
            # Its settings are those of the first group.
        else:
            # An older version, which did not know an option, behaved like its default.
            there = stored.get(name, None if option is None else option.default)
            now = pair[1]
            if there != now:
                is_flag = option is not None
                before, after = (_shown(value, is_flag=is_flag) for value in (there, now))
                texts.append(f"{name}: {before} there, {after} now")
    return texts


def _shown(value: object, *, is_flag: bool = False) -> str:
    """A value in a message; flags as their help shows them."""
    if value is None:
        return _NOT_GIVEN
    return ("no", "yes")[value] if is_flag and isinstance(value, bool) else repr(value)


def _group_differences(stored: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """What differs between parameter groups, each given as 'name=value, name=value'."""
    if len(stored) != len(wanted):
        return [f"parameter groups: {len(stored)} there, {len(wanted)} now"]
    differing = list[str]()
    for number, texts in enumerate(zip(stored, wanted, strict=True)):
        there, now = (
            dict(pair.split("=", 1) for pair in re.split(r", (?=\w+=)", text)) for text in texts
        )
        of_group = f" of parameter group {number}" if len(stored) > 1 else ""
        differing += [
            f"{name}{of_group}: {there.get(name, _NOT_GIVEN)} there, {now.get(name, _NOT_GIVEN)} now"
            for name in {**there, **now}
            if there.get(name) != now.get(name)
        ]
    return differing


def _table_differences(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    return [
        f"config {name}: {_shown(stored.get(name))} there, {_shown(wanted.get(name))} now"
        for name in sorted({*stored, *wanted})
        if name not in stored or name not in wanted or stored[name] != wanted[name]
    ]


POWERSGD_FORGETS = "PowerSGD's errors, which each process carries from step to step, start at zero"


def exactness_facts(device: torch.device, *, compiled: bool) -> dict[str, Any]:
    """The facts about machine and libraries that decide how floating-point sums are rounded."""
    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "device": device.type,
        "threads": torch.get_num_threads(),
        "cpu_kernels": torch.backends.cpu.get_cpu_capability(),
    }
    facts |= switches_set()
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
