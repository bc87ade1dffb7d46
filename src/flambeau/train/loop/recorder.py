"""What a run writes into its folder and reads from it: metrics, checkpoints, the published weights."""

from collections.abc import Callable, Mapping

from flambeau.parallel.ranks import Ranks
from flambeau.train.checkpoints.checkpointer import Checkpointer, Restored
from flambeau.train.checkpoints.metrics_log import MetricsLog
from flambeau.train.checkpoints.published_weights import Result, publish
from flambeau.train.checkpoints.run_folder import RunFolder
from flambeau.train.loop.training_state import TrainingState


class Recorder:
    """The files of a run. Rank 0 writes; of a sharded model each rank writes its pieces.

    Args:
        folder: of the run.
        state: of the run.
        saver: of its checkpoints.
        ranks: of the job.
        all_save: each rank has a part of every checkpoint.
        exactness: what decides the bits besides a checkpoint, for whoever resumes.
        say: takes lines for the user.
    """

    def __init__(
        self,
        folder: RunFolder,
        state: TrainingState,
        saver: Checkpointer,
        *,
        ranks: Ranks,
        all_save: bool,
        exactness: Mapping[str, object],
        say: Callable[[str], None],
    ) -> None:
        self.saver = saver
        self._folder, self._state, self._ranks = folder, state, ranks
        self._all_save, self._exactness, self._say = all_save, exactness, say
        self._metrics_log: MetricsLog | None = None

    def open_metrics(self, found: Restored | None) -> None:
        """Write lines from here on, behind those that a checkpoint has vouched for."""
        if not self._ranks.is_first:
            return
        keep_bytes = 0 if found is None else found.state["metrics_bytes"]
        self._metrics_log = MetricsLog(self._folder.metrics, keep_bytes=keep_bytes)
        if self._metrics_log.missing_bytes:
            self._say(f"{self._folder.metrics} is shorter than at the checkpoint: lines are lost")

    def cut_metrics(self, found: Restored) -> None:
        """Remove the lines since a checkpoint."""
        if self._metrics_log is not None:
            self._metrics_log.cut(found.state["metrics_bytes"])

    def write(self, row: Mapping[str, float]) -> None:
        """Append a line to metrics.jsonl."""
        if self._metrics_log is not None:
            self._metrics_log.write({"step": self._state.step, "epoch": self._state.epoch, **row})

    def save(self) -> None:
        """Copy the state and start writing it as a checkpoint."""
        if not self._ranks.is_first and not self._all_save:
            return
        best, metrics_log = self._state.best.step, self._metrics_log
        size = 0 if metrics_log is None else metrics_log.size
        self.saver.save(
            checkpoint_name(self._state.step),
            self._state.snapshot(metrics_bytes=size, exactness=self._exactness),
            best=None if best is None else checkpoint_name(best),
            before=(lambda: None) if metrics_log is None else metrics_log.sync,
        )

    def wait_for_all(self) -> None:
        """Return when the checkpoint is on the disk; a failure on rank 0 is one on all."""
        if self._all_save:
            self.saver.wait()
        self._ranks.first(self.saver.wait)

    def newest(self) -> Restored | None:
        """The newest checkpoint that is whole, if there is any; all ranks get the same."""
        if self._all_save:  # each rank reads its part
            return self.saver.restore_latest(say=self._say)
        return self._ranks.first(lambda: self.saver.restore_latest(say=self._say))

    def publish(self) -> Result:
        """Copy the preferred weights of the finished run to model.safetensors."""
        self.saver.wait()
        return self._ranks.first(
            lambda: publish(
                self._folder, self._state.results(), name_of=checkpoint_name, say=self._say
            )
        )

    def close(self) -> None:
        """Close metrics.jsonl."""
        if self._metrics_log is not None:
            self._metrics_log.close()
            self._metrics_log = None


def checkpoint_name(step: int) -> str:
    """The folder of a step's checkpoint."""
    return f"step-{step:08d}"
