"""The length of a run in steps, and at which of them something is due."""

from flambeau.data.loading.micro_batch import MicroBatch
from flambeau.run.options.durations import parse_duration


class StepPlan:
    """Durations of a run, turned into steps once.

    Args:
        steps_per_epoch: optimizer steps in an epoch.
        extend: what it is to be longer than that.
        checkpoint_every: a duration.
        log_every: in steps.

    Raises:
        InputError: a duration of another form.
    """

    def __init__(
        self,
        *,
        steps_per_epoch: int,
        duration: str,
        extend: str | None = None,
        checkpoint_every: str,
        log_every: int,
    ) -> None:
        length = parse_duration(duration, name="duration")
        every = parse_duration(checkpoint_every, name="checkpoint_every")
        self.steps_per_epoch = steps_per_epoch
        self.total_steps = max(1, length.steps(steps_per_epoch=steps_per_epoch))
        self.total_steps += self.extension(extend)
        self.save_every = max(1, every.steps(steps_per_epoch=steps_per_epoch))
        self.log_every = log_every

    def extension(self, extend: str | None) -> int:
        """The steps of a run that are beyond its duration."""
        more = parse_duration(extend or "0st", name="extend")
        return more.steps(steps_per_epoch=self.steps_per_epoch)

    def has_line(self, step: int, last: MicroBatch | None) -> bool:
        """Whether metrics.jsonl gets a line after `step`.

        Args:
            step: the number of steps done.
            last: the micro-batch that has just ended the step; None where none has.
        """
        if last is None:
            return False
        return last.ends_epoch or step % self.log_every == 0 or step == self.total_steps

    def next_event(self, step: int) -> int:
        """The next step after `step` at which the loop has something to do."""
        intervals = (self.log_every, self.save_every)
        return min(self.total_steps, *((step // every + 1) * every for every in intervals))
