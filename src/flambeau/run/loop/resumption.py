"""Where a run stands: at a checkpoint, on a resume and where it goes back."""

from dataclasses import dataclass

from flambeau.parallel.ranks import Ranks
from flambeau.run.folder.checkpointer import Restored
from flambeau.run.folder.published_weights import Result, finished
from flambeau.run.folder.run_folder import RunFolder
from flambeau.run.loop.memory_guard import MemoryGuard
from flambeau.run.loop.nan_guard import NanGuard
from flambeau.run.loop.rank_checks import check_shares
from flambeau.run.loop.recorder import Recorder
from flambeau.run.loop.resumable_state import ResumableState
from flambeau.run.loop.run_parts import RunParts
from flambeau.run.loop.training_step import TrainingStep
from flambeau.run.loop.transient_state import TransientState


@dataclass(frozen=True)
class Resumption:
    """Puts checkpoints back.

    Attributes:
        folder, state, loop, parts, recorder, ranks: of the run.
        memory: knows how many samples at once have fitted.
    """

    folder: RunFolder
    state: ResumableState
    loop: TransientState
    parts: RunParts
    recorder: Recorder
    ranks: Ranks
    memory: MemoryGuard

    def resume(self) -> Result | None:
        """Go on from the newest checkpoint that is whole, if there is any; the result of a finished run."""
        found = self.recorder.newest()
        say = self.parts.progress.say
        if found is not None:
            self.go_to(found)
            if self.state.position and self.parts.loader.are_shares:
                check_shares(found.meta["exactness"].get("processes", 1), self.ranks.world)
        if not self.recorder.begin_extension(self.parts.schedule):
            result = self.ranks.first(lambda: finished(self.folder, say=say))
            if result is not None:
                return result
        if found is not None:
            self.recorder.say_where(found)
            self.memory.say_where()
        self.recorder.open_metrics(found)
        return None

    def go_to(self, found: Restored) -> None:
        """Stand where a checkpoint was taken."""
        state = self.state
        state.load(found)
        if not self.ranks.is_first:
            state.leave_to_first()
        next_event = self.parts.plan.next_event(state.step)
        self.loop.restart(saved_step=state.step, next_event=next_event)
        state.window.restart_clock()
        self.recorder.saver.last_good = found.name

    def roll_back(self, steps_before: int, guard: NanGuard, step: TrainingStep) -> None:
        """Go back from a bad step to the newest checkpoint, or stop.

        Raises:
            NotFinite: if the run stops.
        """
        self.loop.stream = None
        why = guard.roll_back(steps_before, self.recorder, self.go_to)
        self.recorder.begin_extension(self.parts.schedule)
        if step.sync is not None:
            step.sync.roll_back()
        self.parts.progress.say(why)
