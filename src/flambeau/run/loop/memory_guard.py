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
from typing import NamedTuple

from torch import Tensor, nn

from flambeau.data.loading.batch_plan import BatchLayout
from flambeau.data.loading.batch_samples import some_samples
from flambeau.data.loading.loader import Loader
from flambeau.data.loading.micro_batch import MicroBatch
from flambeau.errors import InputError
from flambeau.parallel.preemption import OUT_OF_MEMORY, MicroBatchHalved
from flambeau.parallel.ranks import Ranks
from flambeau.recipes.memory.batch_size_finder import is_out_of_memory, release_memory
from flambeau.run.folder.micro_batches_file import FILE, MicroBatches
from flambeau.run.loop.kept_buffers import KeptBuffers
from flambeau.run.loop.memory_table import inputs_of, memory_table
from flambeau.run.loop.resumable_state import ResumableState
from flambeau.run.loop.run_parts import RunParts
from flambeau.run.loop.transient_state import TransientState
from flambeau.terminal import say

SMALLER = "Use smaller images, a smaller model, precision='bf16', or recompute activations"
"""What messages advise where halving has come to its end; a command names its flags."""
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


def halved(layout: BatchLayout, model: nn.Module) -> BatchLayout | None:
    """The same global batches in twice as many micro-batches.

    Args:
        layout: of the batches.
        model: a BatchNorm that it trains needs two samples per process.

    Returns:
        None where the micro-batches cannot be smaller.
    """
    if layout.parts is not None:
        return None
    size = max(
        least_micro_batch(model, layout.world),
        -(-layout.global_batch_size // (2 * layout.num_parts)),
    )
    return layout.with_micro_batches(size) if size < layout.micro_batch_size else None


class MemoryGuard:
    """What a run does where memory runs out inside `around()`.

    One of several ranks cannot begin a batch again, for the others wait for it in a collective call: they are
    all started again, and go on from the newest checkpoint.

    Args:
        folder: of the run; None in a replay, which writes nothing.
        state, loop, parts: of the run.
        ranks: of the job.
    """

    def __init__(
        self,
        folder: Path | None,
        state: ResumableState,
        loop: TransientState,
        parts: RunParts,
        *,
        ranks: Ranks,
    ) -> None:
        self._folder, self._state, self._loop, self._parts = folder, state, loop, parts
        self._ranks = ranks
        self._start = _Start()
        self._why = ""
        self._buffers = KeptBuffers(state.model)
        self._inputs: Tensor | None = None
        if ranks.is_first and ranks.watch is not None:
            ranks.watch.heed = self._heed

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Forward pass, loss and step of a batch, or the forward pass of an evaluation.

        Raises:
            InputError: memory has run out where smaller micro-batches do not help, or cannot be made.
        """
        loop = self._loop
        micro = loop.micro if loop.evaluated is None else None
        if micro is not None and micro.part == 1:
            self._begin()
        loop.is_guarded = True
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._refuse(error)
            loop.is_short = True
            self._why = _first_line(error)
            self._inputs = None if micro is None else inputs_of(micro.data)
            release_memory(error)
        else:
            if not loop.is_open:
                loop.settle()
        finally:
            loop.is_guarded = False

    def _begin(self) -> None:
        """A global batch begins."""
        state = self._state
        self._loop.is_open = True
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
        if not self._loop.is_open:
            raise InputError(
                f"out of memory in step {self._state.step or 1}, after its backward pass, where smaller "
                f"micro-batches do not help ({_first_line(error)})\n{SMALLER}"
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
        now = halved(loader.layout, parts.model)
        table = memory_table(state, parts, self._inputs)
        text = f"out of memory in step {step}: micro-batches of {before.micro_batch_size}"
        if now is None:
            parts.progress.show(table)
            raise InputError(
                f"{text} do not fit, and cannot be made smaller ({self._why})\n{SMALLER}"
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
        loop.stream = loop.micro = None
        loop.is_short = loop.is_open = loop.is_partial = False
        loop.unfinished.clear()
        state.position, state.order_crc = start.position, start.order_crc
        state.window.take_back(start.num_losses, start.total_samples)
        for thing in state.user.values():
            take_back = getattr(thing, "take_back", None)  # of our own alone
            if take_back is not None:
                take_back()
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

    def _heed(self, text: str) -> None:
        """Another rank has left; called on the first one, in the thread of its watchdog."""
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
            yield micro.data if size == micro.size else some_samples(micro.data, part, stacked=True)
            if not loop.is_short:
                continue
            loop.is_short = False
            loop.unfinished.clear()
            release_memory()
            if self._parts.shards is not None:
                self.begin_again(lambda: None)
            if not can_cut or size < 2:
                raise InputError(
                    f"out of memory in an evaluation, with {size} samples at once ({self._why})\n"
                    + (
                        SMALLER
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
