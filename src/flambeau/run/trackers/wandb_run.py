"""A run of Weights & Biases: online if the user is logged in, else offline in the run folder's `wandb`.

Offline, each start makes a folder with the same id, and `wandb sync` replaces earlier ones by the last
(wandb/wandb, issue 3841), so each needs all lines.
"""

import os
from collections.abc import Mapping
from typing import Any

from flambeau.run.trackers.tracker import Position, TrackedRun

_RECORD = "wandb"
# Without a server W&B would wait 90 s for one, and then forever when the process exits.
_INIT_S = 20.0  # chosen
_FINISH_S = 8.0  # less than END_WAIT_S of RunTrackers; chosen


class WandbRun:
    """Logs into one run of W&B; see `Tracker`."""

    flush_s = 60.0  # W&B writes in a process of its own

    def __init__(self, facts: TrackedRun) -> None:
        import wandb

        self._wandb, self._facts = wandb, facts
        self._run: Any = None

    def start(self) -> Position:
        """Start, or continue the recorded run; what W&B already has is not sent again."""
        wandb, facts = self._wandb, self._facts
        noted = facts.record(_RECORD).get("id")
        mode = None
        # Without an account it would prompt on the terminal.
        if not os.environ.get("WANDB_MODE") and not wandb.login(prompt=False, verify=False):
            mode = "offline"
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "flambeau",
            name=facts.name,
            id=noted if isinstance(noted, str) else None,
            dir=facts.folder,
            config=dict(facts.config),
            resume="allow",
            mode=mode,
            settings=wandb.Settings(
                console="off",
                silent=True,
                reinit="create_new",
                init_timeout=_INIT_S,
                finish_timeout=_FINISH_S,
            ),
        )
        facts.note(_RECORD, {"id": self._run.id})
        if self._run.offline:
            facts.say(f"wandb is offline: wandb sync {self._run.settings.sync_dir} uploads the run")
        elif self._run.url:
            facts.say(f"wandb: {self._run.url}")
        return Position(self._run.starting_step, 0)

    def line(self, step: int, figures: dict[str, float]) -> None:
        self._run.log(figures, step=step)

    def rewind(self, position: Position) -> Position:
        """W&B accepts no step twice: the figures from before the rollback stay."""
        return position

    def flush(self, sent: Position) -> None:
        """W&B's process writes by itself."""

    def end(self, result: Mapping[str, Any] | None) -> None:
        if result is not None:
            self._run.summary.update({f"result/{name}": value for name, value in result.items()})
        self._run.finish(exit_code=0 if result is not None else 1)
