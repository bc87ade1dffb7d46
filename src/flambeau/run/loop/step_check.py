"""Every n-th step is computed twice, and its gradients compared bit for bit before the optimizer acts.

A processor or memory that computes something wrong raises no error. Two computations of a step from the same
state have the same bits, so a difference is the machine's; further ones decide between them. Of several
ranks each one first computes the micro-batches of another, which sees a processor that is wrong every time.
"""

import copy
import functools
import io
import pickle
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from flambeau.data.loading.micro_batch import MicroBatch
from flambeau.errors import InputError
from flambeau.parallel.gradient_sync.interface import GradientSync
from flambeau.parallel.preemption import FAULTY_MACHINE
from flambeau.parallel.ranks import Ranks
from flambeau.recipes.parallel.sync_batchnorm import SyncBatchNorm
from flambeau.run.folder.identity import exactness_facts
from flambeau.run.loop.run_parts import RunParts
from flambeau.run.loop.state import CountedByRanks, ResumableState, TransientState
from flambeau.run.loop.step_verdict import Computation, Verdict, digest, shortened, verdict
from flambeau.run.options.durations import parse_share
from flambeau.run.options.run_options import RunOptions

_ALIGNED = 64  # bytes; torch's allocators align at least so


def step_check(
    options: RunOptions,
    state: ResumableState,
    loop: TransientState,
    parts: RunParts,
    ranks: Ranks,
    *,
    compiled: bool,
) -> "StepCheck | None":
    """The check of a run, if it is asked for; InputError: with PowerSGD on several ranks."""
    every = parse_share(options.verify_steps, name="verify_steps")
    if not every or options.replay_from is not None:
        return None
    if ranks.world > 1 and options.compression == "powersgd":
        raise InputError(
            f"verify_steps = {options.verify_steps!r} does not work with compression = 'powersgd', which "
            "adds to each step what it has rounded away in the one before: leave one of them out"
        )
    why = None
    if ranks.world > 1:
        why = _why_alone(state, parts, ranks, in_parts=options.parts is not None, compiled=compiled)
    return StepCheck(every, state, loop, parts, ranks, why_alone=why)


def _why_alone(
    state: ResumableState, parts: RunParts, ranks: Ranks, *, in_parts: bool, compiled: bool
) -> str | None:
    """Why no rank can compute the share of another with the same bits; None if it can."""
    if parts.shards is not None:
        return "the model is sharded"
    if _beside_the_model(state):
        return "the optimizer has parameters beside the model's, which each process updates alone"
    synced = (SyncBatchNorm, nn.SyncBatchNorm)
    if not in_parts and any(isinstance(m, synced) for m in parts.model.modules()):
        return "SyncBatchNorm adds in the order of the processes (parts= fixes that)"
    if compiled or any(hasattr(m, "_orig_mod") for m in parts.model.modules()):
        return "the model is compiled, by each process for the shapes that it has seen"
    facts = ranks.gather(exactness_facts(parts.amp.device, compiled=False))
    for rank, theirs in enumerate(facts):
        for name in sorted({*facts[0], *theirs}):
            there = theirs.get(name, "no")
            if (here := facts[0].get(name, "no")) != there:
                return f"{name} is {here} on rank 0 and {there} on rank {rank}"
    return None


class MachineFault(SystemExit):
    """The computations of a step do not agree; leaves the process with exit code 70."""

    def __init__(self) -> None:
        super().__init__(FAULTY_MACHINE)


@dataclass(frozen=True)
class _Start:
    """What a rank's computation of a step starts from, beside the weights."""

    micros: Sequence[MicroBatch]
    buffers: Mapping[str, Tensor]
    user: Mapping[str, Any]
    of_python: tuple[Any, Any]


class StepCheck:
    """The computations of the current step, if it is one of those that are checked.

    Of several ranks each first computes the share of the rank before it, then its own, from which the
    optimizer goes on. Where the two computations of any share differ, a third rank computes it (of two ranks
    the same as at first), and then its owner again. With `why_alone` each computes its own share, twice or
    thrice.

    Args:
        every: so many steps from one checked step to the next; the first of them is step number `every`.
    """

    def __init__(
        self,
        every: int,
        state: ResumableState,
        loop: TransientState,
        parts: RunParts,
        ranks: Ranks,
        *,
        why_alone: str | None,
    ) -> None:
        self._every, self._state, self._loop = every, state, loop
        self._ranks = ranks
        self._progress = parts.progress
        self._describe = parts.loader.describe
        self._device = parts.amp.device
        self.sync: GradientSync | None = None
        self._sharded = None if parts.shards is None else parts.model
        self._why_alone = why_alone
        self._num_checked = 0  # since this start
        self._num_differed = 0
        self._forget()

    def _forget(self) -> None:
        self._step: int | None = None  # the number of the step that is checked now, from 1
        self._own: _Start | None = None
        self._sent: Tensor | None = None  # the same for other ranks
        self._start: _Start | None = None  # of the current computation
        self._weights: dict[str, Tensor] = {}
        self._gradients: dict[str, Tensor | None] = {}  # left by earlier steps
        self._num_done = 0
        self._found: dict[int, dict[str, Tensor]] = {}
        self._computations: list[Computation] = []

    @property
    def _rotates(self) -> bool:
        return self._ranks.world > 1 and self._why_alone is None

    @property
    def _plan(self) -> Sequence[int]:
        """By computation: how many ranks before this one the rank stands whose share it computes."""
        return (1, 0, 2 % self._ranks.world or 1, 0) if self._rotates else (0, 0, 0)

    @property
    def skips_evaluation(self) -> bool:
        """Whether the loop's body evaluates before its step in another computation than this one.

        In the second one, since that has the buffers of this rank.
        """
        return self._step is not None and self._num_done != 1

    def begin(self, micro: MicroBatch) -> MicroBatch:
        """Before the loop's body gets a micro-batch: the one that it is to get.

        Keeps what each computation of a checked step starts from.
        """
        number = self._state.step + 1
        if micro.part != 1 or number % self._every:
            return micro
        if self._start is None:
            # Also out of memory, when a step begins again in smaller micro-batches.
            self._keep(number, micro)
            self._hand_out()
            micro = self._loop.again.popleft()
        assert self._start is not None
        behind = self._plan[self._num_done]
        if self.sync is not None:
            self.sync.hold(behind=behind, is_trial=self._num_done == 0 or behind > 0)
        self._put_back(self._start)
        self._start = None
        self._found = {}
        self._state.begin_global_batch()
        self._loop.begin_revocable()
        return micro

    def note(self, loss: Tensor, micro: MicroBatch) -> None:
        """After the backward pass of a micro-batch: take the digests of what it has computed."""
        if self._step is None:
            return
        found = {
            f"the gradient of {name}": digest(_local(p.grad))
            for name, p in self._with_gradients().items()
            if p.grad is not None
        }
        self._found[micro.part] = found | {"the loss": digest(loss.detach())}

    def agrees(self) -> bool:
        """After the last backward pass of a step: whether the optimizer may use its gradients.

        If not, the step is undone on all ranks, and micro-batches come again.

        Raises:
            MachineFault: the computations do not agree.
        """
        if self._step is None:
            return True
        behind = self._plan[self._num_done]
        self._num_done += 1
        ranks = self._ranks
        share = (ranks.rank - behind) % ranks.world
        mine = Computation(self._num_done, share, ranks.rank, self._read())
        self._computations += ranks.gather(mine)
        found = verdict(self._computations, world=ranks.world, rotates=self._rotates)
        if found.holds and behind == 0:
            self._num_checked += 1
            self._num_differed += bool(found.differences)
            if found.differences:
                self._say_goes_on(found)
            self._forget()
            return True
        if self._num_done == len(self._plan):
            self._say_stops(found)
            raise MachineFault
        self._state.undo_global_batch()
        self._hand_out()
        self._loop.repeat_next()
        return False

    def say_summary(self, *, is_end: bool) -> None:
        """How many steps were computed twice; at the end of a run also that there were none."""
        share = f"verify_steps = '1/{self._every}'"
        if not self._num_checked:
            if not is_end:
                return
            self._progress.say(
                f"{share}: no step was computed twice since this start, which ends at step "
                f"{self._state.step}: it is for steps whose number is a multiple of {self._every}"
            )
            return
        outcome = "each time to the same bits"
        if self._num_differed:
            outcome = f"in {self._num_differed} of them the computations differed, as said above"
        steps = f"{self._num_checked} step{'s' * (self._num_checked > 1)}"
        self._progress.say(f"{share}: {steps} computed twice since this start, {outcome}")

    # ---------------------------------------------------------------- one step

    def _keep(self, number: int, first: MicroBatch) -> None:
        self._forget()
        self._step = number
        micros = [first]
        assert self._loop.stream is not None
        while not micros[-1].ends_batch:
            micros.append(next(self._loop.stream))
        self._weights = {name: p.detach().clone() for name, p in self._parameters().items()}
        self._gradients = {
            name: None if p.grad is None else p.grad.clone()
            for name, p in self._with_gradients().items()
        }
        self._own = _Start(
            [micro._replace(data=_copied(micro.data)) for micro in micros],
            {name: holder[key].clone() for name, holder, key in self._buffers()},
            {
                name: _copied(thing.state_dict())
                for name, thing in self._state.user.items()
                if not isinstance(thing, CountedByRanks)  # which take back what they have counted
            },
            (random.getstate(), np.random.get_state()),
        )
        if self._rotates:
            self._sent, why = _pickled(self._own)
            self._why_alone = next((why for why in self._ranks.gather(why) if why), None)
        if self._why_alone is not None:
            self._progress.say_once(
                f"verify_steps: each process computes its own share of a step again, as {self._why_alone}; "
                "a processor that computes the same wrong bits each time is not seen so"
            )

    def _hand_out(self) -> None:
        """Let the micro-batches of the next computation come next."""
        assert self._own is not None
        behind = self._plan[self._num_done]
        self._start = self._own
        if behind:
            assert self._sent is not None
            received = self._ranks.pass_on(self._sent, by=behind)
            self._start = _unpickled(received, device=self._device)
        # Copies: the loop's body may write into its batch.
        self._loop.again.extend(m._replace(data=_copied(m.data)) for m in self._start.micros)

    def _put_back(self, start: _Start) -> None:
        """Make all that the loop's body may have changed what it was before the step."""
        with torch.no_grad():
            for name, p in self._parameters().items():
                p.copy_(self._weights[name])
            for name, p in self._with_gradients().items():
                left = self._gradients[name]
                p.grad = None if left is None else left.clone()
            for name, holder, key in self._buffers():
                value = start.buffers[name]
                if holder[key].shape == value.shape:
                    # Beside its version, by which a forward pass that writes buffers is known.
                    holder[key].data.copy_(value)
                else:
                    holder[key] = value.clone()
        for name, saved in start.user.items():
            self._state.user[name].load_state_dict(_copied(saved))
        random.setstate(start.of_python[0])
        np.random.set_state(start.of_python[1])

    def _read(self) -> dict[int, dict[str, int]]:
        """The digests of this computation; waits for the device once."""
        # Of weights, too: a loop may change them itself, and then does so in each computation.
        self._found[0] = {name: digest(p.detach()) for name, p in self._parameters().items()}
        on_device = [
            one.to(self._device) for found in self._found.values() for one in found.values()
        ]
        numbers = iter(torch.stack(on_device).tolist())
        return {
            part: {name: next(numbers) for name in found} for part, found in self._found.items()
        }

    # ---------------------------------------------------------------- what is said

    def _say_goes_on(self, found: Verdict) -> None:
        where = (
            "the machine" if not found.suspects else f"the machine of {self._named(found.suspects)}"
        )
        self._progress.say(
            f"{self._text(found)}; computation {self._num_done} agrees with an earlier one, and the run goes "
            f"on: a processor or the memory of {where} may be faulty"
        )

    def _say_stops(self, found: Verdict) -> None:
        if not self._rotates:
            why = f"no two of {self._num_done} computations agree"
            where = "continue it on another machine"
        elif found.suspects:
            why = f"{self._named(found.suspects)} disagrees with the other ranks again"
            where = "continue it without that machine"
        else:
            why = "the ranks do not agree, and nothing shows which of them is wrong"
            where = "continue it on other machines"
        self._progress.say(
            f"{self._text(found)}; {why}, and the run stops before the optimizer acts: {where}"
        )

    def _named(self, ranks: Sequence[int]) -> str:
        hosts = self._ranks.gather(self._ranks.host)
        return " and ".join(f"rank {rank} ({hosts[rank]})" for rank in ranks)

    def _text(self, found: Verdict) -> str:
        """What differed, in which samples."""
        world = self._ranks.world
        asked = [d.micro_batch for d in found.differences if d.left.share == self._ranks.rank]
        samples = self._ranks.gather({part: self._samples(part) for part in asked})
        said = [f"{d.text(world)}{samples[d.left.share][d.micro_batch]}" for d in found.differences]
        return f"step {self._step}: {'; '.join(said)}"

    def _samples(self, part: int) -> str:
        """Of this rank's own micro-batch, or all of the step for 0."""
        assert self._own is not None
        micros = [micro for micro in self._own.micros if part in (0, micro.part)]
        indices = [int(index) for micro in micros for index in micro.indices[micro.local]]
        names = shortened([self._describe(index) for index in indices])
        return f" ({names})" if names else ""

    # ---------------------------------------------------------------- tensors

    def _parameters(self) -> dict[str, nn.Parameter]:
        """Those of the model, and what else the optimizer has."""
        return {**dict(self._state.model.named_parameters()), **_beside_the_model(self._state)}

    def _with_gradients(self) -> dict[str, nn.Parameter]:
        """What a backward pass gives gradients to: of a sharded model not yet the optimizer's pieces."""
        return (
            self._parameters() if self._sharded is None else dict(self._sharded.named_parameters())
        )

    def _buffers(self) -> list[tuple[str, dict[str, Any], str]]:
        """Name, holder and key in it of each buffer."""
        return [
            (f"{name}.{key}", module._buffers, key)
            for name, module in self._state.model.named_modules()
            for key, buffer in module._buffers.items()
            if buffer is not None
        ]


def _beside_the_model(state: ResumableState) -> dict[str, nn.Parameter]:
    """What the optimizer has and the model has not, such as a parameter of the loss."""
    known = set(map(id, state.model.parameters()))
    parameters = [p for group in state.optimizer.param_groups for p in group["params"]]
    return {
        f"parameter {number} of the optimizer": p
        for number, p in enumerate(parameters)
        if id(p) not in known
    }


def _pickled(start: _Start) -> tuple[Tensor | None, str | None]:
    """Its bytes, or why there are none."""
    data = io.BytesIO()
    try:
        torch.save(start, data)
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
        return None, f"a batch, or what state= saves, cannot be sent to another process ({error})"
    return torch.frombuffer(data.getbuffer(), dtype=torch.uint8), None


def _unpickled(data: Tensor, *, device: torch.device) -> _Start:
    """Of another process of this job; what was on its accelerator is then on `device`."""
    moved = functools.partial(_moved, device=device)
    start: _Start = torch.load(
        io.BytesIO(data.numpy().data), map_location=moved, weights_only=False
    )
    return start


def _moved(storage: Any, location: str, *, device: torch.device) -> Any:
    return storage if location == "cpu" else storage.to(device=device)


def _local(tensor: Tensor) -> Tensor:
    """This rank's piece of a DTensor, whose module only sharded models import; else the tensor."""
    piece: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return piece


def _copied(data: Any) -> Any:
    """The same tree with copies of its tensors, which keep their layout."""

    def copied(leaf: Any) -> Any:
        return _clone(leaf.detach()) if isinstance(leaf, Tensor) else copy.deepcopy(leaf)

    return tree_map(copied, data)


def _clone(tensor: Tensor) -> Tensor:
    """A copy that begins as far from a multiple of 64 bytes: MKL's sums depend on it.

    The share that a rank takes of a loader's batch begins anywhere.
    """
    clone = tensor.clone()
    if type(tensor) is not Tensor or tensor.layout is not torch.strided:
        return clone
    before, more = divmod(tensor.data_ptr() % _ALIGNED, tensor.element_size())
    if not before or more:
        return clone
    memory = tensor.new_empty(before + clone.numel())
    return memory.as_strided(clone.size(), clone.stride(), before).copy_(tensor)
