"""The length of a run in steps, and at which steps something is due."""

from flambeau.data.loading.micro_batch import MicroBatch
from flambeau.run.options.durations import parse_duration


class StepPlan:
    """Durations of a run, converted to steps once."""

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
        more = parse_duration(extend or "0st", name="extend")
        return more.steps(steps_per_epoch=self.steps_per_epoch)

    def has_line(self, step: int, last: MicroBatch | None) -> bool:
        """Whether metrics.jsonl gets a line after this step, ended by the micro-batch `last`, if any."""
        if last is None:
            return False
        return last.ends_epoch or step % self.log_every == 0 or step == self.total_steps

    def next_event(self, step: int) -> int:
        """The next step after this one with a line, a checkpoint or the end."""
        intervals = (self.log_every, self.save_every)
        return min(self.total_steps, *((step // every + 1) * every for every in intervals))
