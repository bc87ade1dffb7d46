"""A run of Weights & Biases: online where the user is logged in, else offline in the folder `wandb` of a run.

Offline each start makes a folder of its own with the id of the run, and `wandb sync` lets the last one
replace the others (wandb/wandb, issue 3841); so each gets all lines, from the first one on.
"""

import os
from collections.abc import Mapping
from typing import Any

from flambeau.run.trackers.tracker import Place, RunFacts

_RECORD = "wandb"
# Without a server W&B would wait 90 s for one and then, at the exit of the process, for ever.
_INIT_S, _FINISH_S = 20.0, 8.0  # the second is within the time that the end of a run gives; chosen


class WandbRun:
    """Logs into one run of W&B; see `Tracker`.

    Args:
    """

    flush_s = 60.0  # its own process writes

    def __init__(self, facts: RunFacts) -> None:
        import wandb

        self._wandb, self._facts = wandb, facts
        self._run: Any = None

    def start(self) -> Place:
        """Begin, or go on with the run of the noted id; what W&B has already is not sent again."""
        wandb, facts = self._wandb, self._facts
        noted = facts.record(_RECORD).get("id")
        mode = None
        # Without an account it would ask on the terminal.
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
        return Place(self._run.starting_step, 0)

    def line(self, step: int, figures: dict[str, float]) -> None:
        """The figures of one step become one row."""
        self._run.log(figures, step=step)

    def go_back(self, place: Place) -> Place:
        """W&B takes no step twice: the figures of those before the rollback stay."""
        return place

    def flush(self, sent: Place) -> None:
        """Its own process writes."""

    def end(self, result: Mapping[str, Any] | None) -> None:
        """The final figures, and whether the run is finished."""
        if result is not None:
            self._run.summary.update({f"result/{name}": value for name, value in result.items()})
        self._run.finish(exit_code=0 if result is not None else 1)
