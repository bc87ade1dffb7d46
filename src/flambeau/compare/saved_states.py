"""Compares checkpoints of two runs tensor by tensor, after verifying each.

A checkpoint may come from anywhere: its manifest is bounded, its files are regular ones of the listed sizes,
and no tensor is larger than what is stored of it.
"""

import itertools
import math
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from flambeau.compare.tensor_difference import TensorDifference, tensor_difference
from flambeau.parallel.shard_layout import INDEX, read_index
from flambeau.recipes.checkpoints.atomic_checkpoint import (
    MANIFEST,
    CheckpointDamaged,
    checkpoint_folders,
    read_checkpoint,
)
from flambeau.regular_file import read_file
from flambeau.run.folder.checkpointer import Restored, restored
from flambeau.run.folder.json_file import json_file

_MAX_DEPTH = 20  # nested containers in a state; a run has 5
_MAX_VALUES = 1_000_000  # tensors and numbers of a state
_POSITION = ("step", "epoch", "position", "order_crc", "rollbacks", "lr_scale")
GENERATORS = "generators/"
_GROUP = "parameter group "


@dataclass(frozen=True)
class StateDifference:
    """How two states of the same step differ.

    Attributes:
        tensors: those that differ, of model, averages and optimizer.
        values: numbers and texts that differ, by name.
    """

    step: int
    tensors: list[TensorDifference]
    values: dict[str, tuple[Any, Any]]
    num_tensors: int

    @property
    def is_options_only(self) -> bool:
        """Only options of the optimizer differ, such as its rate; the trained values are equal."""
        return not self.tensors and all(name.startswith(_GROUP) for name in self.values)

    @property
    def flipped_bit(self) -> TensorDifference | None:
        """The tensor, if a single bit of it is all that differs."""
        one = self.tensors[0] if len(self.tensors) == 1 and not self.values else None
        return one if one is not None and one.flipped_bit is not None else None

    def as_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "num_tensors": self.num_tensors,
            "tensors": [tensor.as_json() for tensor in self.tensors[:200]],
            "values": {name: list(map(str, pair)) for name, pair in self.values.items()},
        }


@dataclass(frozen=True)
class Damaged:
    """A checkpoint of run 0 or 1 that has changed since it was saved.

    `changed_bytes`: how the file differs from the other run's, if saved alike.
    """

    run: int
    name: str
    why: str
    changed_bytes: str | None = None


def steps_of(folder: Path) -> list[int]:
    try:
        names = [path.name for path in checkpoint_folders(folder / "checkpoints")]
    except OSError:
        return []
    steps = [name.removeprefix("step-") for name in names]
    return [int(step) for step in steps if len(step) <= 18]


def checkpoint_of(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:08d}"


def read_state(folder: Path) -> Restored:
    """A verified checkpoint; CheckpointDamaged: changed since it was saved, or of no run."""
    damaged = partial(CheckpointDamaged, folder)
    try:
        manifest = json_file(folder / MANIFEST)
        for name, entry in manifest["files"].items():
            path = folder / name
            size = entry["size"]
            if not isinstance(size, int) or not isinstance(entry["sha256"], str):
                raise damaged(MANIFEST, "is no list of files")
            if "/" in name or not path.is_file():
                raise damaged(name, "is missing")
            if path.stat().st_size != size:
                raise damaged(name, f"has {path.stat().st_size} of the {size} bytes saved")
        checkpoint = read_checkpoint(folder)
        if INDEX in checkpoint.files:
            _check_pieces(checkpoint.files, folder)
        state = restored(checkpoint)
        if sum(1 for _ in itertools.islice(_leaves(state), _MAX_VALUES + 1)) > _MAX_VALUES:
            raise ValueError(f"its state holds more than {_MAX_VALUES} values")
        return state
    except CheckpointDamaged:
        raise
    except FileNotFoundError:
        raise damaged(MANIFEST, "is missing") from None
    except (
        OSError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        RuntimeError,
        RecursionError,
        pickle.UnpicklingError,
        SafetensorError,
        EOFError,
    ) as error:
        why = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise damaged(folder.name, f"is not of a run: {why}") from error


def _check_pieces(files: Mapping[str, bytes], folder: Path) -> None:
    """Refuse an index that claims more than its files hold, before allocating memory for it."""
    claimed = 0
    for entry in read_index(files[INDEX], folder).values():
        dtype = getattr(torch, entry["dtype"])
        shape = entry["shape"]
        if not all(isinstance(size, int) and size >= 0 for size in shape):
            raise ValueError("a shape in sharding.json is none")
        claimed += math.prod(shape) * dtype.itemsize
    if claimed > sum(map(len, files.values())):
        raise ValueError("sharding.json claims more than the files hold")


def is_written_alike(left: Path, right: Path, file: str) -> bool:
    """Whether two manifests list a file with the same SHA-256."""
    digests = []
    for folder in (left, right):
        try:
            digests.append(json_file(folder / MANIFEST)["files"][file]["sha256"])
        except (OSError, ValueError, LookupError, TypeError):
            return False
    return isinstance(digests[0], str) and digests[0] == digests[1]


def state_difference(
    step: int, left: Restored, right: Restored, *, generators: bool = False
) -> StateDifference | None:
    """How two states of one step differ; None if the training is equal.

    Random generators count only where asked for: a run seeds them for each batch.
    """
    sides = dict(_leaves(left)), dict(_leaves(right))
    tensors = []
    values = {}
    num_tensors = 0
    for name in dict.fromkeys([*sides[0], *sides[1]]):
        if name.startswith(GENERATORS) and not generators:
            continue
        a = sides[0].get(name)
        b = sides[1].get(name)
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            num_tensors += 1
            difference = tensor_difference(name, a, b)
            if difference is not None:
                tensors.append(difference)
        elif isinstance(a, Tensor) or isinstance(b, Tensor):
            num_tensors += 1
            where = "second" if a is None else "first"
            tensors.append(TensorDifference(name, what=f"a tensor in the {where} run alone"))
        elif a != b and not (a != a and b != b):  # NaN equals NaN
            values[name] = a, b
    return StateDifference(step, tensors, values, num_tensors) if tensors or values else None


def _leaves(state: Restored) -> Iterator[tuple[str, Any]]:
    """Tensors and numbers of a state, by name: of the model, its averages, the optimizer, the rest."""
    whole = state.state
    yield from _within("", _sorted(state.model))
    if state.ema is not None:
        yield from _within("average of ", _sorted(state.ema))
    optimizer = whole.get("optimizer")
    if not isinstance(optimizer, dict):
        raise ValueError("it holds no state of an optimizer")
    for number, entries in dict(optimizer.get("state", {})).items():
        yield from _within(f"optimizer state of parameter {number}: ", entries)
    for number, group in enumerate(optimizer.get("param_groups", ())):
        options = {name: value for name, value in group.items() if name != "params"}
        yield from _within(f"{_GROUP}{number}: ", options)
    yield from _within("loss scale: ", whole.get("amp"))
    # The history of samples has no effect on the training, and differs with the data before the first step.
    user = whole.get("user")
    if isinstance(user, Mapping):
        user = {name: state for name, state in user.items() if name != "sample_history"}
    yield from _within("state of ", user)
    yield from _within("", {name: whole.get(name) for name in _POSITION})
    yield from _within(GENERATORS, whole.get("rng"))


def _sorted(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By name, 2 before 10; statistics of BatchNorm after parameters."""

    def key(name: str) -> tuple[bool, list[tuple[int, str]]]:
        parts = re.split(r"([0-9]{1,9})", name)
        is_statistic = name.endswith(("running_mean", "running_var", "num_batches_tracked"))
        return is_statistic, [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]

    return {name: tensors[name] for name in sorted(tensors, key=key)}


def _within(prefix: str, value: Any, *, depth: int = 0) -> Iterator[tuple[str, Any]]:
    if depth > _MAX_DEPTH:
        raise ValueError("its state is nested too deeply")
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_meta:
            raise ValueError(f"{prefix or 'a tensor'} in it has no elements")
        if value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise ValueError(f"{prefix} in it claims more than is stored")
        yield prefix.rstrip("./ :"), value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _within(
                f"{prefix}{key}" + ("." * isinstance(inner, dict | list)), inner, depth=depth + 1
            )
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _within(f"{prefix}{number}.", inner, depth=depth + 1)
    else:
        yield prefix.rstrip("./ :"), value


def step_losses(state: Restored, *, accumulate: int) -> dict[int, tuple[float, ...]]:
    """A checkpoint's losses by step, from 1, and forward pass, since the last line of metrics.jsonl.

    `accumulate`: forward passes per step, if not recorded.
    """
    window, step = state.state.get("window"), state.state.get("step")
    if not isinstance(window, dict) or not isinstance(step, int) or accumulate < 1:
        return {}
    try:
        settled = [float(loss) for loss, _ in window.get("settled", ())]
        losses = settled + [float(loss) for loss in window["losses"]]
        ends = [int(end) for end in window.get("ends", ())]
    except (TypeError, ValueError, LookupError, RuntimeError):
        return {}
    steps = [losses[n : n + accumulate] for n in range(0, len(losses), accumulate)]
    if ends and ends[-1] == len(losses) and sorted(set(ends)) == ends:
        steps = [losses[low:high] for low, high in itertools.pairwise((0, *ends))]
    first = step - len(steps) + 1
    return {first + number: tuple(passes) for number, passes in enumerate(steps)}


def first_loss_difference(
    left: Mapping[int, Sequence[float]], right: Mapping[int, Sequence[float]]
) -> tuple[int, tuple[float, float]] | None:
    """The first common step with different losses, and these; None if there is none.

    Only steps with as many forward passes in both count.
    """
    for step in sorted(left.keys() & right.keys()):
        if len(left[step]) == len(right[step]):
            for a, b in zip(left[step], right[step], strict=True):
                if a != b and not (a != a and b != b):  # NaN equals NaN
                    return step, (a, b)
    return None


def pairs(
    left: Path, right: Path, damaged: list[Damaged]
) -> Iterator[tuple[int, Restored, Restored]]:
    """The checkpoints of equal steps, ascending; damaged ones are appended to `damaged`."""
    for step in sorted(set(steps_of(left)) & set(steps_of(right))):
        folders = checkpoint_of(left, step), checkpoint_of(right, step)
        states = []
        for run, folder in enumerate(folders):
            try:
                states.append(read_state(folder))
            except CheckpointDamaged as error:
                if not (folder.exists() or folder.is_symlink()):
                    break  # the run still trains, and has just removed it
                alike = is_written_alike(*folders, error.name)
                change = _change(folders, run, error.name) if alike else None
                damaged.append(Damaged(run, folder.name, f"{error.name} {error.what}", change))
        if len(states) == 2:
            yield step, states[0], states[1]


def _change(folders: tuple[Path, Path], run: int, file: str) -> str | None:
    """How a damaged file differs from the other run's, in words, if both were saved alike."""
    try:
        ours, theirs = (read_file(folders[k] / file) for k in (run, 1 - run))
    except OSError:
        return None
    if len(ours) != len(theirs):
        return f"it has {len(ours)} of {len(theirs)} bytes"
    sides = [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in (ours, theirs)]
    difference = tensor_difference(file, *sides) if ours else None
    if difference is None:
        return None
    if difference.flipped_bit is not None:
        byte, bit = difference.flipped_bit
        return f"bit {bit} of byte {byte} has flipped on the disk"
    return f"{difference.num_different} of its bytes have changed on the disk"
