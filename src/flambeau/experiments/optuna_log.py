"""optuna.log: the trials of a sweep as Optuna keeps them, for its dashboard and its plots."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from flambeau.errors import naming
from flambeau.experiments.proposals import Known, distribution, engine, frozen
from flambeau.experiments.space import Space
from flambeau.recipes.checkpoints.atomic_checkpoint import write_file

STUDY = "sweep"
"""Name of the study in the file."""


class _NoLock:
    """Of a file that this process alone knows.

    Optuna's locks need a disk with links, or say of a disk error that the lock is somebody else's.
    """

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        """Nothing was taken."""


def write_optuna_log(
    path: Path, space: Space, known: Sequence[Known], *, mode: Literal["max", "min"]
) -> None:
    """Write the file anew, whole or not at all, for a dashboard's next reload."""
    optuna = engine()
    storages = optuna.storages
    made = path.with_name(f".{path.name}.new")
    made.unlink(missing_ok=True)
    distributions = {name: distribution(dimension) for name, dimension in space.items()}
    with warnings.catch_warnings(), naming(path):
        warnings.simplefilter("ignore")
        study = optuna.create_study(
            storage=storages.JournalStorage(
                storages.journal.JournalFileBackend(str(made), lock_obj=_NoLock())
            ),
            study_name=STUDY,
            direction="maximize" if mode == "max" else "minimize",
        )
        study.add_trials([frozen(trial, distributions) for trial in known])
    write_file(path, made.read_bytes())
    made.unlink()
