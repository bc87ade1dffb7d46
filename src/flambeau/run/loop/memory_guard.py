"""Out of memory in a batch: undo the global batch and repeat it in smaller micro-batches.

Nothing of the unfinished global batch remains: no gradient, loss, figure or normalization statistic. So the
run continues like one that was started with these micro-batches.
"""

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from flambeau.data.loading.batch_samples import slice_samples
from flambeau.data.loading.loader import Loader
from flambeau.data.loading.micro_batch import MicroBatch
from flambeau.errors import InputError
from flambeau.parallel.preemption import OUT_OF_MEMORY, MicroBatchHalved
from flambeau.parallel.ranks import Ranks
from flambeau.recipes.memory.batch_size_finder import is_out_of_memory, release_memory
from flambeau.recipes.memory.memory_budget import activations_by_module, top_modules
from flambeau.run.folder.micro_batches_file import FILE, MicroBatches
from flambeau.run.loop.run_parts import RunParts
from flambeau.run.loop.state import ResumableState, TransientState
from flambeau.run.options.advice import Advice
from flambeau.terminal import say

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def least_micro_batch(model: nn.Module, world: int) -> int:
    """The fewest samples of a micro-batch over all processes: two per process where a BatchNorm trains."""
    has_norm = any(isinstance(m, _NORMS) and m.training for m in model.modules())
    return world * (2 if has_norm else 1)


class MemoryGuard:
    """Handles running out of memory inside `around()`.

    One of several ranks cannot repeat a batch, for which the others wait: all restart from the newest
    checkpoint.
    """

    def __init__(
        self,
        folder: Path | None,
        state: ResumableState,
        loop: TransientState,
        parts: RunParts,
        *,
        ranks: Ranks,
        advice: Advice,
    ) -> None:
        self._folder, self._state, self._loop, self._parts = folder, state, loop, parts
        self._ranks = ranks
        self._advice = advice
        self._why = ""
        self._buffers = BufferCopies(state.model)
        self._inputs: Tensor | None = None
        if ranks.is_first and ranks.watch is not None:
            ranks.watch.on_restart_note = self._note_request

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Around the forward pass, loss and step of a batch, or the forward pass of an evaluation.

        InputError: smaller micro-batches do not help or are impossible.
        """
        loop = self._loop
        is_evaluation = loop.evaluated is not None
        micro = None if is_evaluation else loop.micro
        if is_evaluation:
            loop.begin_evaluated()
        elif micro is not None and micro.part == 1:
            self._begin()
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._check_can_halve(error)
            loop.run_out()
            self._why = _first_line(error)
            self._inputs = None if micro is None else inputs_of(micro.data)
            release_memory(error)
        else:
            if is_evaluation:
                loop.end_evaluated()

    def _begin(self) -> None:
        self._loop.begin_revocable()
        self._state.begin_global_batch()
        if self._ranks.world == 1:
            self._buffers.keep()

    def _check_can_halve(self, error: Exception) -> None:
        """Raise if smaller micro-batches do not help or cannot be made."""
        if self._loop.evaluated is not None:
            return
        step = self._state.step + 1
        if not self._loop.is_revocable:
            raise InputError(
                f"out of memory in step {self._state.step or 1}, after its backward pass, where smaller "
                f"micro-batches do not help ({_first_line(error)})\n{self._advice.save_memory}"
            ) from error
        if not isinstance(self._parts.loader, Loader):
            raise InputError(
                f"out of memory in step {step}, and its batches are those of the loader that Run was given: "
                "let it make smaller ones and raise accumulate, or give Run the Dataset"
            ) from error

    def begin_again(
        self, save: Callable[[], object], close: Callable[[], object] = lambda: None
    ) -> None:
        """Undo the current global batch, so that it starts over in smaller micro-batches.

        Raises:
            InputError: one sample per process does not fit.
            MicroBatchHalved: of several ranks: all are to restart.
        """
        state = self._state
        parts = self._parts
        loader = self._parts.loader
        assert isinstance(loader, Loader)  # by _check_can_halve
        step = state.step + 1
        before = loader.layout
        now = before.halved(min_size=least_micro_batch(parts.model, before.world))
        table = memory_table(state, parts, self._inputs)
        text = f"out of memory in step {step}: micro-batches of {before.micro_batch_size}"
        if now is None:
            parts.progress.show(table)
            raise InputError(
                f"{text} do not fit, and cannot be made smaller ({self._why})\n{self._advice.save_memory}"
            )
        text += f" -> {now.micro_batch_size} samples, {now.num_parts} per step"
        sizes = dataclasses.replace(
            parts.reader.micro_batches, step=step, training=now.micro_batch_size
        )
        if self._ranks.world > 1:
            self._leave(text, table, sizes)
            close()
            raise MicroBatchHalved
        self._undo()
        state.micro_batch = now.micro_batch_size
        loader.set_micro_batches(now.micro_batch_size)
        parts.progress.say(f"{text}; the step begins again ({self._why})")
        parts.progress.show(table)
        # The checkpoint first: a start from an older one must run out of memory in the same step again.
        save()
        self._note(sizes)

    def _undo(self) -> None:
        self._loop.give_up()
        self._state.undo_global_batch()
        self._parts.model.zero_grad(set_to_none=True)
        self._buffers.put_back()
        release_memory()

    def _leave(self, text: str, table: str, sizes: MicroBatches) -> None:
        """Report that all ranks must be started again, with smaller micro-batches."""
        self._parts.progress.say_from_any_rank(
            f"rank {self._ranks.rank}: {text}; all processes go on from the newest checkpoint when they are "
            f"started again ({self._why})"
        )
        say(table)
        self._note(sizes)
        if self._ranks.watch is not None:
            self._ranks.watch.fail(text, OUT_OF_MEMORY, restart_note=sizes.as_json())

    def _note_request(self, text: str) -> None:
        """Note the sizes that another rank, which ran out of memory and left, needs at the next start.

        The watchdog of rank 0 calls it in its thread.
        """
        sizes = MicroBatches(**json.loads(text))
        self._note(sizes)
        self._parts.progress.log_event(
            f"out of memory in step {sizes.step}: micro-batches of {sizes.training} samples from now on"
        )

    def _note(self, sizes: MicroBatches) -> None:
        self._parts.reader.micro_batches = sizes
        if self._folder is not None and self._ranks.is_first:
            sizes.write(self._folder)

    def say_resumed(self) -> None:
        """Say the reduced micro-batch of a run that is continued."""
        sizes = self._parts.reader.micro_batches
        loader = self._parts.loader
        if sizes.step and sizes.training is not None and isinstance(loader, Loader):
            self._parts.progress.show(
                f"micro-batches of {loader.layout.micro_batch_size} samples, since memory ran out in step "
                f"{sizes.step} (remove {FILE} to try the larger ones again)"
            )

    # ---------------------------------------------------------------- evaluations

    def evaluated_parts(self, micro: MicroBatch, loader: object) -> Iterator[object]:
        """An evaluation's batch, in parts that fit; another part is cut and repeated.

        InputError: one sample does not fit, or the batch cannot be cut. MicroBatchHalved: a sharded model
        needs all ranks for each part.
        """
        loop = self._loop
        reader = self._parts.reader
        can_cut = self._parts.shards is None and isinstance(loader, Loader) and loader.stacks
        todo = _cut(slice(0, micro.size), reader.micro_batches.evaluation if can_cut else None)
        indices = _indices(micro)
        while todo:
            part = todo.pop(0)
            loop.indices = None if indices is None else indices[part]
            size = loop.num_samples = part.stop - part.start
            yield (
                micro.data if size == micro.size else slice_samples(micro.data, part, stacked=True)
            )
            if not loop.is_out_of_memory:
                continue
            loop.end_evaluated()
            release_memory()
            if self._parts.shards is not None:
                self.begin_again(lambda: None)
            if not can_cut or size < 2:
                raise InputError(
                    f"out of memory in an evaluation, with {size} samples at once ({self._why})\n"
                    + (
                        self._advice.save_memory
                        if can_cut
                        else "Let its loader or collate function make smaller batches"
                    )
                )
            most = -(-size // 2)
            self._parts.progress.say(
                f"out of memory in an evaluation, with {size} samples at once: from now on {most} at most "
                f"({self._why})"
            )
            step = max(1, self._state.step)
            self._note(dataclasses.replace(reader.micro_batches, step=step, evaluation=most))
            todo = [piece for left in (part, *todo) for piece in _cut(left, most)]


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:120]


def _cut(whole: slice, most: int | None) -> list[slice]:
    """Parts of at most so many samples, of sizes that differ by at most one."""
    size = whole.stop - whole.start
    num_parts = max(1, -(-size // most)) if most else 1
    bounds = [whole.start + number * size // num_parts for number in range(num_parts + 1)]
    return [slice(*pair) for pair in itertools.pairwise(bounds) if pair[0] < pair[1]] or [whole]


class BufferCopies:
    """Copies of a checkpoint's buffers, in one call per dtype kind.

    Not of non-persistent buffers, which may change their shape.
    """

    def __init__(self, model: nn.Module) -> None:
        self._slots = [
            (module._buffers, name)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        ]
        self._kept: list[list[Tensor]] | None = None

    def keep(self) -> None:
        """Copy them; does not wait for the device."""
        live = self._live()
        with torch.no_grad():
            if self._kept is None:
                self._kept = [[tensor.clone() for tensor in group] for group in live]
            else:
                _copy(live, self._kept)

    def put_back(self) -> None:
        if self._kept is not None:
            with torch.no_grad():
                _copy(self._kept, self._live())

    def _live(self) -> list[list[Tensor]]:
        """The current buffers, floating and integer ones apart: one kernel copies tensors of one type."""
        tensors: list[Any] = [holder[name] for holder, name in self._slots]
        floating = [tensor for tensor in tensors if tensor.is_floating_point()]
        return [floating, [tensor for tensor in tensors if not tensor.is_floating_point()]]


def _copy(source: list[list[Tensor]], target: list[list[Tensor]]) -> None:
    for sources, targets in zip(source, target, strict=True):
        if sources:
            torch._foreach_copy_(targets, sources)


def _indices(micro: MicroBatch) -> Tensor | None:
    """Positions in the data of the samples that count; None: not known, as of a loader."""
    local = micro.indices[micro.local]
    local = local[~np.isin(local, list(micro.bad))]
    return torch.from_numpy(local) if len(local) == micro.size else None


_MAX_ROWS = 12  # of modules; the rest is summed up in one
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_COLUMNS = ("parameters", "gradients", "optimizer", "activations")


def inputs_of(data: Any) -> Tensor | None:
    """A batch's first tensor, the usual input, on the meta device."""
    first = next((leaf for leaf in tree_leaves(data) if isinstance(leaf, Tensor)), None)
    if first is None:
        return None
    # Byte images are converted before a model sees them.
    dtype = torch.float32 if first.dtype is torch.uint8 else first.dtype
    return torch.empty_like(first, dtype=dtype, device="meta")


def memory_table(state: ResumableState, parts: RunParts, inputs: Tensor | None) -> str:
    """Parameters, gradients, optimizer state and activations of a forward pass, in MiB, by module.

    Without inputs on the meta device, or where the model fails on it, without activations.
    """
    kept: Mapping[str, int] = {}
    if inputs is not None and parts.shards is None:
        try:
            kept = activations_by_module(
                parts.model, (inputs,), autocast=_DTYPES.get(parts.amp.precision)
            )
        # Any model may fail on tensors without values, and a table must not end a run that can continue.
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            kept = {}
    rows = {name: [0, 0, 0, kept.get(name, 0)] for name in ("", *top_modules(parts.model))}
    for name, parameter in state.model.named_parameters():  # a sharded model: this rank's pieces
        module = next((row for row in rows if row and f"{name}.".startswith(f"{row}.")), "")
        state_of = state.optimizer.state.get(parameter, {})
        for column, tensors in enumerate(([parameter], [parameter.grad], state_of.values())):
            rows[module][column] += _bytes(tensors)
    return _table(rows, has_activations=bool(kept))


def _bytes(tensors: Iterable[Any]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))


def _table(rows: Mapping[str, list[int]], *, has_activations: bool) -> str:
    """Modules in their order, without empty ones; beyond the largest, the rest in one row."""
    total = [sum(column) for column in zip(*rows.values(), strict=True)]
    named = {name or "(model itself)": row for name, row in rows.items() if any(row)}
    largest = sorted(named, key=lambda name: -sum(named[name]))[:_MAX_ROWS]
    shown = {name: row for name, row in named.items() if name in largest}
    if rest := [row for name, row in named.items() if name not in largest]:
        shown[f"{len(rest)} others"] = [sum(column) for column in zip(*rest, strict=True)]
    shown["all"] = total
    columns = _COLUMNS if has_activations else _COLUMNS[:-1]
    width = max(map(len, ["MiB in memory", *shown]))
    lines = ["  ".join([f"{'MiB in memory':<{width}}", *(f"{name:>11}" for name in columns)])]
    for name, row in shown.items():
        sizes = (f"{size / 2**20:11.1f}" for size in row[: len(columns)])
        lines.append("  ".join([f"{name:<{width}}", *sizes]))
    return "\n".join(f"  {line}" for line in lines)
