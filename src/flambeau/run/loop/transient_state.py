"""What the loop of a run remembers from one method to the next; none of it is in a checkpoint."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from flambeau.data.loading.micro_batch import MicroBatch
from flambeau.recipes.training.metrics import MeanOnDevice


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
        part_of: the steps before that of the last batch, and the batch's number for random draws.
        num_samples: of the last batch, for the means that are logged; -1 before the first.
        asks_to_stop: this process has called `run.stop()`, and the others may not know it yet.
        evaluated: the means of an evaluation under way.
        is_guarded: the loop is inside `run.halving()`, so what it counts may be taken back.
        is_partial: gradients of a part of the global batch are there, and not of all.
        is_open: a global batch has begun so, and its backward passes are not all done.
        is_short: memory has run out there; the batch is to come again.
        unfinished: counts what was logged of it, once it is done.
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
    is_guarded: bool = False
    is_partial: bool = False
    is_open: bool = False
    is_short: bool = False
    unfinished: list[Callable[[], object]] = field(default_factory=list)

    def begin(self, micro: MicroBatch, *, step: int) -> None:
        """A batch is handed to the loop, after `step` steps."""
        self.micro = micro
        self.num_samples = micro.size
        self.part_of = step, micro.draw

    def keep(self) -> Callable[[], None]:
        """Note which batch is under way, and forget it; what is returned puts it back."""
        kept = self.micro, self.num_samples, self.part_of
        self.micro = None

        def put_back() -> None:
            self.micro, self.num_samples, self.part_of = kept

        return put_back

    def count(self, work: Callable[[], object]) -> None:
        """Count something of the batch under way: now, or when it is done, if it may be taken back."""
        if self.is_guarded:
            self.unfinished.append(work)
        else:
            work()

    def settle(self) -> None:
        """The batch under way is done: what was logged of it counts."""
        for work in self.unfinished:
            work()
        self.unfinished.clear()

    def restart(self, *, saved_step: int, next_event: int) -> None:
        """As in a new process that goes on from a checkpoint."""
        self.halted_steps.zero_()
        self.next_event, self.saved_step = next_event, saved_step
        self.stream = self.micro = self.done = self.evaluated = None
        self.asks_to_stop = self.is_partial = self.is_open = self.is_short = False
        self.unfinished.clear()
        self.num_samples = 0
