"""Every n-th step is computed twice, and its gradients compared bit for bit before the optimizer acts.

A processor or memory that computes something wrong now and then raises no error. Two computations of a step
from the same state have the same bits, so a difference is the machine's; a third one decides between them.
"""

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from flambeau.data.loading.micro_batch import MicroBatch
from flambeau.errors import InputError
from flambeau.parallel.preemption import FAULTY_MACHINE
from flambeau.parallel.ranks import Ranks
from flambeau.run.loop.progress_bar import ProgressBar
from flambeau.run.loop.run_parts import RunParts
from flambeau.run.loop.state import CountedByRanks, ResumableState, TransientState
from flambeau.run.options.durations import parse_share
from flambeau.run.options.run_options import RunOptions

_MOST = 3  # computations of a step
_MOST_NAMED = 3
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def step_check(
    options: RunOptions,
    state: ResumableState,
    loop: TransientState,
    parts: RunParts,
    ranks: Ranks,
) -> "StepCheck | None":
    """The check of a run, if it is asked for; InputError: with `parts` or a sharded model."""
    every = parse_share(options.verify_steps, name="verify_steps")
    if not every or options.replay_from is not None:
        return None
    if options.parts is not None or parts.shards is not None:
        what = "parts" if parts.shards is None else "a sharded model"
        raise InputError(
            f"verify_steps = {options.verify_steps!r} does not work with {what}: leave one of them out"
        )
    return StepCheck(every, state, loop, parts.progress, ranks, describe=parts.loader.describe)


class MachineFault(SystemExit):
    """No two of three computations of a step agreed; leaves the process with exit code 70."""

    def __init__(self) -> None:
        super().__init__(FAULTY_MACHINE)


class StepCheck:
    """The computations of the current step, if it is one of those that are checked.

    Args:
        every: so many steps from one checked step to the next; the first of them is step number `every`.
        describe: the name of a sample by its index.
    """

    def __init__(
        self,
        every: int,
        state: ResumableState,
        loop: TransientState,
        progress: ProgressBar,
        ranks: Ranks,
        *,
        describe: Callable[[int], str],
    ) -> None:
        self._every, self._state, self._loop = every, state, loop
        self._progress, self._ranks, self._describe = progress, ranks, describe
        self._step: int | None = None  # the number of the step that is checked now, from 1
        self._micros: list[MicroBatch] = []
        self._weights: dict[str, Tensor] = {}
        self._buffers: list[tuple[nn.Module, str, Tensor]] = []
        self._user: dict[str, Any] = {}
        self._passes: dict[int, Mapping[str, Tensor]] = {}  # what each has given, by its number
        self._num_passes = 0
        self._faults: list[str] = []
        self._of_python: tuple[Any, Any] = (None, None)

    @property
    def is_again(self) -> bool:
        """A computation after the first: the loop's body has evaluated before its step already."""
        return self._num_passes > 0

    def begin(self, micro: MicroBatch) -> None:
        """Before the loop's body gets a micro-batch: keep what a second computation starts from."""
        number = self._state.step + 1
        if number % self._every:
            return
        if micro.part == 1:
            # Out of memory a step begins again in smaller micro-batches, whose sums have other bits.
            is_again = self._num_passes > 0 and len(micro.indices) == len(self._micros[0].indices)
            if is_again:
                self._put_back()  # now, as the loop's body goes on after its step
            else:
                self._keep(number)
            self._state.begin_global_batch()
            self._loop.begin_revocable()
        if self._num_passes == 0:
            self._micros.append(micro._replace(data=_copied(micro.data)))

    def agrees(self, losses: Sequence[Tensor]) -> bool:
        """After the last backward pass of a step: whether the optimizer may use its gradients.

        If not, the step is undone on all ranks, and its micro-batches come again.

        Raises:
            MachineFault: no two of three computations agree.
        """
        if self._step is None:
            return True
        self._num_passes += 1
        same = self._ranks.gather(self._same_passes(losses))
        if set.intersection(*same):
            self._end()
            return True
        if self._num_passes == _MOST:
            text = self._text()
            self._progress.say(
                f"{text}; no two of {_MOST} computations agree, and the run stops before the optimizer acts: "
                "continue it on another machine"
            )
            raise MachineFault
        self._again()
        return False

    def _same_passes(self, losses: Sequence[Tensor]) -> set[int]:
        """The earlier computations with whose bits this rank's newest one agrees."""
        found = self._tensors(losses)
        same = set()
        for number, before in self._passes.items():
            if other := _different(before, found):
                self._note(f"computations {number} and {self._num_passes} differ", other)
            else:
                same.add(number)
        self._passes[self._num_passes] = found
        return same

    # ---------------------------------------------------------------- one step

    def _keep(self, number: int) -> None:
        self._forget()
        self._step = number
        self._weights = {name: p.detach().clone() for name, p in self._parameters().items()}
        self._buffers = [
            (module, name, buffer.detach().clone())
            for module in self._state.model.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]
        self._user = {
            name: _copied(thing.state_dict())
            for name, thing in self._state.user.items()
            if not isinstance(thing, CountedByRanks)  # which take back what they have counted
        }
        self._of_python = random.getstate(), np.random.get_state()

    def _put_back(self) -> None:
        """Make all that the loop's body may have changed what it was before the step."""
        with torch.no_grad():
            for name, weight in self._parameters().items():
                weight.copy_(self._weights[name])
            for module, name, value in self._buffers:
                live = getattr(module, name)
                if isinstance(live, Tensor) and live.shape == value.shape:
                    live.copy_(value)
                else:
                    setattr(module, name, value.clone())
        for name, saved in self._user.items():
            self._state.user[name].load_state_dict(_copied(saved))
        random.setstate(self._of_python[0])
        np.random.set_state(self._of_python[1])

    def _again(self) -> None:
        """Undo what this computation has counted, and hand out the same micro-batches."""
        self._state.undo_global_batch()
        # Copies again: the loop's body may write into its batch.
        self._loop.repeat(micro._replace(data=_copied(micro.data)) for micro in self._micros)

    def _end(self) -> None:
        if self._num_passes > 2:  # else nothing differed, on any rank
            text = self._text()
            self._progress.say(
                f"{text}; computation {self._num_passes} agrees with an earlier one, and the run goes on: a "
                "processor or the memory of the machine may be faulty"
            )
        self._forget()

    def _forget(self) -> None:
        self._step = None
        self._micros = []
        self._weights = {}
        self._buffers = []
        self._user = {}
        self._passes = {}
        self._num_passes = 0
        self._faults = []

    def _note(self, what: str, names: Sequence[str]) -> None:
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        self._faults.append(f"{what} in {', '.join(names[:_MOST_NAMED])}{more}")

    def _text(self) -> str:
        """What differed, by rank, and the samples of the step."""
        mine = ("; ".join(self._faults), self._samples() if self._faults else "")
        said = [
            (f"rank {rank}: " if self._ranks.world > 1 else "") + f"{faults}{samples}"
            for rank, (faults, samples) in enumerate(self._ranks.gather(mine))
            if faults
        ]
        return f"step {self._step}: {'; '.join(said)}"

    def _samples(self) -> str:
        indices = [int(index) for micro in self._micros for index in micro.indices[micro.local]]
        shown = [self._describe(index) for index in indices[:_MOST_NAMED]]
        more = f" and {len(indices) - len(shown)} more" if len(indices) > len(shown) else ""
        return f" (samples {', '.join(shown)}{more})" if shown else ""

    # ---------------------------------------------------------------- tensors

    def _parameters(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self._state.model.named_parameters()}

    def _tensors(self, losses: Sequence[Tensor]) -> dict[str, Tensor]:
        # Weights, too: a loop may change them itself, as by clamping, and then does so in each computation.
        weights = {name: weight.clone() for name, weight in self._parameters().items()}
        losses_by_name = {f"loss {k}": loss.detach().clone() for k, loss in enumerate(losses, 1)}
        gradients = {
            f"the gradient of {name}": p.grad.detach().clone()
            for name, p in self._state.model.named_parameters()
            if p.grad is not None
        }
        return weights | losses_by_name | gradients


def _copied(data: Any) -> Any:
    """The same tree with copies of its tensors, which keep their layout."""

    def copied(leaf: Any) -> Any:
        return leaf.detach().clone() if isinstance(leaf, Tensor) else copy.deepcopy(leaf)

    return tree_map(copied, data)


def _different(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> list[str]:
    """The names of tensors that are not the same bits in both; waits for the device once."""
    names = sorted(left.keys() & right.keys())
    alone = sorted(left.keys() ^ right.keys())
    if not names:
        return alone
    flags = torch.stack([(_bits(left[name]) != _bits(right[name])).any() for name in names])
    return alone + [name for name, is_other in zip(names, flags.tolist(), strict=True) if is_other]


def _bits(tensor: Tensor) -> Tensor:
    """The numbers as integers, so that NaN equals itself and 0 is not -0."""
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return values if values.dtype is torch.bool else values.view(_INTEGERS[values.element_size()])
