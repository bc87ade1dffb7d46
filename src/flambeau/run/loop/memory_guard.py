"""Out of memory in a batch: it is given up, and the same global batch begins again in smaller micro-batches.

Nothing of an unfinished global batch stays: no gradient, loss, figure or statistic of a normalization. So the
run is from there on one that was started with these micro-batches.
"""

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flambeau.data.loading.batch_samples import slice_samples
from flambeau.data.loading.loader import Loader
from flambeau.data.loading.micro_batch import MicroBatch
from flambeau.errors import InputError
from flambeau.parallel.preemption import OUT_OF_MEMORY, MicroBatchHalved
from flambeau.parallel.ranks import Ranks
from flambeau.recipes.memory.batch_size_finder import is_out_of_memory, release_memory
from flambeau.run.folder.micro_batches_file import FILE, MicroBatches
from flambeau.run.loop.memory_table import inputs_of, memory_table
from flambeau.run.loop.resumable_state import ResumableState
from flambeau.run.loop.run_parts import RunParts
from flambeau.run.loop.transient_state import TransientState
from flambeau.run.options.advice import Advice
from flambeau.terminal import say

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class _Start(NamedTuple):
    """Where the global batch under way has begun."""

    position: int = 0
    order_crc: int = 0
    num_losses: int = 0
    total_samples: int = 0


def least_micro_batch(model: nn.Module, world: int) -> int:
    """Samples that all processes together need at least: two each where a BatchNorm is trained."""
    has_norm = any(isinstance(m, _NORMS) and m.training for m in model.modules())
    return world * (2 if has_norm else 1)


class MemoryGuard:
    """What a run does where memory runs out inside `around()`.

    One of several ranks cannot begin a batch again, for the others wait for it in a collective call: they are
    all started again, and go on from the newest checkpoint.

    Args:
        folder: of the run; None in a replay, which writes nothing.
        advice: what messages advise.
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
        self._start = _Start()
        self._why = ""
        self._buffers = KeptBuffers(state.model)
        self._inputs: Tensor | None = None
        if ranks.is_first and ranks.watch is not None:
            ranks.watch.on_wish = self._note_wish

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Forward pass, loss and step of a batch, or the forward pass of an evaluation.

        Raises:
            InputError: memory has run out where smaller micro-batches do not help, or cannot be made.
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
            self._refuse(error)
            loop.run_out()
            self._why = _first_line(error)
            self._inputs = None if micro is None else inputs_of(micro.data)
            release_memory(error)
        else:
            if is_evaluation:
                loop.end_evaluated()

    def _begin(self) -> None:
        """A global batch begins."""
        state = self._state
        self._loop.begin_revocable()
        losses = len(state.window.losses)
        seen = state.window.total_samples
        self._start = _Start(state.position, state.order_crc, losses, seen)
        if self._ranks.world == 1:
            self._buffers.keep()

    def _refuse(self, error: Exception) -> None:
        """See that smaller micro-batches can be made, and help."""
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
        """Give the global batch under way up, and let it begin again in smaller micro-batches.

        Args:
            save: writes a checkpoint of the run as it stands then, and waits for it.
            close: gives back what the run holds, where this rank leaves.

        Raises:
            InputError: one sample per process does not fit.
            MicroBatchHalved: one of several ranks leaves, for all to be started again.
        """
        state = self._state
        parts = self._parts
        loader = self._parts.loader
        assert isinstance(loader, Loader)  # _refuse has seen to it
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
        fitting = dataclasses.replace(
            parts.reader.fitting, step=step, training=now.micro_batch_size
        )
        if self._ranks.world > 1:
            self._leave(text, table, fitting)
            close()
            raise MicroBatchHalved
        self._take_back()
        state.micro_batch = now.micro_batch_size
        loader.set_micro_batches(now.micro_batch_size)
        parts.progress.say(f"{text}; the step begins again ({self._why})")
        parts.progress.show(table)
        # Before the note: a start from an older checkpoint is to run out in the same step again.
        save()
        self._note(fitting)

    def _take_back(self) -> None:
        """All that the unfinished global batch has left."""
        state, loop, start = self._state, self._loop, self._start
        loop.give_up()
        state.position, state.order_crc = start.position, start.order_crc
        state.window.take_back(start.num_losses, start.total_samples)
        for thing in state.counted_by_ranks():
            thing.take_back()
        state.optimizer.zero_grad(set_to_none=True)
        self._parts.model.zero_grad(set_to_none=True)
        self._buffers.put_back()
        release_memory()

    def _leave(self, text: str, table: str, fitting: MicroBatches) -> None:
        """Say and note that all ranks are to be started again, and need smaller micro-batches."""
        self._parts.progress.say_from_any_rank(
            f"rank {self._ranks.rank}: {text}; all processes go on from the newest checkpoint when they are "
            f"started again ({self._why})"
        )
        say(table)
        self._note(fitting)
        if self._ranks.watch is not None:
            self._ranks.watch.fail(text, OUT_OF_MEMORY, wish=fitting.as_json())

    def _note_wish(self, text: str) -> None:
        """Note what another rank, which has run out of memory and left, needs at the next start.

        The watchdog of the first rank calls it, in a thread of its own.
        """
        fitting = MicroBatches(**json.loads(text))
        self._note(fitting)
        self._parts.progress.tell_folder(
            f"out of memory in step {fitting.step}: micro-batches of {fitting.training} samples from now on"
        )

    def _note(self, fitting: MicroBatches) -> None:
        self._parts.reader.fitting = fitting
        if self._folder is not None and self._ranks.is_first:
            fitting.write(self._folder)

    def say_where(self) -> None:
        """A run that is continued says what it has come down to."""
        fitting = self._parts.reader.fitting
        loader = self._parts.loader
        if fitting.step and fitting.training is not None and isinstance(loader, Loader):
            self._parts.progress.show(
                f"micro-batches of {loader.layout.micro_batch_size} samples, since memory ran out in step "
                f"{fitting.step} (remove {FILE} to try the larger ones again)"
            )

    # ---------------------------------------------------------------- evaluations

    def evaluated_parts(self, micro: MicroBatch, loader: object) -> Iterator[object]:
        """The data of a batch of an evaluation, in parts that fit; one that does not comes again, cut in two.

        Args:
            micro: the batch.
            loader: that has made it.

        Raises:
            InputError: a sample alone does not fit, or the batch cannot be cut.
            MicroBatchHalved: a sharded model needs all ranks for each part.
        """
        loop = self._loop
        reader = self._parts.reader
        can_cut = self._parts.shards is None and isinstance(loader, Loader) and loader.stacks
        todo = _cut(slice(0, micro.size), reader.fitting.evaluation if can_cut else None)
        while todo:
            part = todo.pop(0)
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
            self._note(dataclasses.replace(reader.fitting, step=step, evaluation=most))
            todo = [piece for left in (part, *todo) for piece in _cut(left, most)]


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:120]


def _cut(whole: slice, most: int | None) -> list[slice]:
    """Parts of so many samples at most, which differ by one at most."""
    size = whole.stop - whole.start
    num_parts = max(1, -(-size // most)) if most else 1
    bounds = [whole.start + number * size // num_parts for number in range(num_parts + 1)]
    return [slice(*pair) for pair in itertools.pairwise(bounds) if pair[0] < pair[1]] or [whole]


class KeptBuffers:
    """Copies of the buffers that a checkpoint holds, taken in one call for each kind of them.

    Others are tables that a model makes again, and may be of another shape by then.

    Args:
        model: whose buffers are meant.
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
        """Let the model have what was copied last."""
        if self._kept is not None:
            with torch.no_grad():
                _copy(self._kept, self._live())

    def _live(self) -> list[list[Tensor]]:
        """As they are now, floating ones and counts apart: one kernel copies tensors of one type."""
        tensors: list[Any] = [holder[name] for holder, name in self._slots]
        floating = [tensor for tensor in tensors if tensor.is_floating_point()]
        return [floating, [tensor for tensor in tensors if not tensor.is_floating_point()]]


def _copy(source: list[list[Tensor]], target: list[list[Tensor]]) -> None:
    for tensors, places in zip(source, target, strict=True):
        if tensors:
            torch._foreach_copy_(places, tensors)
