"""What the loop of a run remembers from one method to the next; none of it is in a checkpoint."""

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from flambeau.data.loading.micro_batch import MicroBatch
from flambeau.recipes.training.metrics import MeanOnDevice


class Phase(enum.Enum):
    """How far the global batch under way is, and whether it can be given up and begun again.

    The transitions are the methods of `TransientState`:

        BETWEEN -> REVOCABLE (its first forward pass, inside `run.halving()`) -> REVOCABLE_PARTIAL -> BETWEEN
        BETWEEN -> PARTIAL (a backward pass outside of it) -> BETWEEN
        BETWEEN -> EVALUATED (a batch of an evaluation, inside `run.halving()`) -> BETWEEN
        REVOCABLE, REVOCABLE_PARTIAL, EVALUATED -> OUT_OF_MEMORY -> BETWEEN

    An evaluation begins with BETWEEN; afterwards the phase is what it was before.
    """

    BETWEEN = "no gradient of a global batch is there"
    REVOCABLE = "its first forward pass is under way, and nothing has been counted for good"
    REVOCABLE_PARTIAL = "gradients of some of its parts are there, and nothing was counted for good"
    PARTIAL = "gradients of some of its parts are there"
    EVALUATED = "a batch of an evaluation is under way, which can be cut in two"
    OUT_OF_MEMORY = "memory has run out, and the batch comes again"


_REVOCABLE = (Phase.REVOCABLE, Phase.REVOCABLE_PARTIAL)
_PARTIAL = (Phase.PARTIAL, Phase.REVOCABLE_PARTIAL)


@dataclass
class TransientState:
    """The place of the loop between and within its methods.

    Attributes:
        halted_steps: 0-d, on the device: steps since the first one whose loss or gradient was not finite.
        next_event: the step after which a line, a checkpoint or the end is due.
        saved_step: of the newest checkpoint; -1 before the first.
        stream: the batches of the epochs to come; None until they are asked for.
        micro: the batch that was yielded and waits for its step.
        done: the batch that has ended a step, while the loop's body may not be done with it.
        part_of: how many steps were done before the last batch, and the key of its sums.
        num_samples: of the last batch, for the means that are logged; -1 before the first.
        asks_to_stop: this process has called `run.stop()`, and the others may not know it yet.
        evaluated: the means of an evaluation under way.
        phase: of the global batch.
        held_back: counts what was logged of it, once it is done.
    """

    halted_steps: Tensor
    next_event: int = 0
    saved_step: int = -1
    stream: Iterator[MicroBatch] | None = None
    micro: MicroBatch | None = None
    done: MicroBatch | None = None
    part_of: tuple[int, int] = (0, 0)
    num_samples: int = -1
    asks_to_stop: bool = False
    evaluated: dict[str, MeanOnDevice] | None = None
    phase: Phase = Phase.BETWEEN
    held_back: list[Callable[[], object]] = field(default_factory=list)

    def begin(self, micro: MicroBatch, *, step: int) -> None:
        """A batch is handed to the loop, after `step` steps."""
        self.micro = micro
        self.num_samples = micro.size
        self.part_of = step, micro.sum_key

    def keep(self) -> Callable[[], None]:
        """Note which batch is under way, and forget it; what is returned puts it back."""
        kept = self.micro, self.num_samples, self.part_of
        self.micro = None

        def put_back() -> None:
            self.micro, self.num_samples, self.part_of = kept

        return put_back

    # ---------------------------------------------------------------- the phase of the global batch

    @property
    def is_partial(self) -> bool:
        """Gradients of some parts of a global batch are there, and not of all."""
        return self.phase in _PARTIAL

    @property
    def is_revocable(self) -> bool:
        """The global batch can be given up and begun again."""
        return self.phase in _REVOCABLE

    @property
    def is_out_of_memory(self) -> bool:
        """Memory has run out, and the batch under way comes again."""
        return self.phase is Phase.OUT_OF_MEMORY

    def begin_revocable(self) -> None:
        """A global batch begins inside `run.halving()`."""
        self.phase = Phase.REVOCABLE

    def begin_evaluated(self) -> None:
        """A batch of an evaluation begins inside `run.halving()`."""
        self.phase = Phase.EVALUATED

    def end_evaluated(self) -> None:
        """A batch of an evaluation is done, and what was logged counts; or it has run out of memory."""
        if self.is_out_of_memory:
            self.held_back.clear()
        self.phase = Phase.BETWEEN
        self.settle()

    def end_part(self, *, ends_batch: bool) -> None:
        """The backward pass of a part is done; with the last one, what was logged counts."""
        if ends_batch:
            self.phase = Phase.BETWEEN
            self.settle()
        else:
            self.phase = Phase.REVOCABLE_PARTIAL if self.is_revocable else Phase.PARTIAL

    def run_out(self) -> None:
        """Memory has run out in a batch that can be given up."""
        self.phase = Phase.OUT_OF_MEMORY

    def give_up(self) -> None:
        """Forget the global batch under way."""
        self.stream = None
        self.micro = None
        self.phase = Phase.BETWEEN
        self.held_back.clear()

    def count(self, work: Callable[[], object]) -> None:
        """Count something of the batch under way: now, or when it is done, if it may be given up.

        Of a batch that has run out of memory nothing counts: it comes again.
        """
        if self.is_revocable or self.phase is Phase.EVALUATED:
            self.held_back.append(work)
        elif not self.is_out_of_memory:
            work()

    def settle(self) -> None:
        """The batch under way is done: what was logged of it counts."""
        for work in self.held_back:
            work()
        self.held_back.clear()

    def restart(self, *, saved_step: int, next_event: int) -> None:
        """As in a new process that continues from a checkpoint."""
        self.give_up()
        self.halted_steps.zero_()
        self.next_event = next_event
        self.saved_step = saved_step
        self.done = None
        self.evaluated = None
        self.asks_to_stop = False
        self.num_samples = 0
