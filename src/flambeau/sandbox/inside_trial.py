"""For code that may run inside a trial: whether it does, and where it puts its run."""

import contextlib
import hashlib
import os
from pathlib import Path

MARK = "FLAMBEAU_TRIAL"
"""Environment variable of a trial's processes: the folder of the trial."""

HELD = "FLAMBEAU_TRIAL_HELD"
"""Environment variable of a trial whose writing reaches no file of the user."""

RUNS = "runs"
"""In that folder, a folder for each run that is trained inside."""


def in_trial() -> bool:
    """Whether doctor or tune runs this process to time it."""
    return MARK in os.environ


def folder_for_run(path: Path) -> Path:
    """The folder in which a run is trained: in a trial an empty one, not the user's run.

    A link leads there if the user has no such folder and nothing is written outside.
    """
    if not in_trial():
        return path
    runs = Path(os.environ[MARK]) / RUNS
    if path.is_relative_to(runs):
        return path
    folder = runs / hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:16]
    if HELD in os.environ and not os.path.lexists(path):
        # Scripts save beside their checkpoints, and read them, by the path that they gave.
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):  # another rank made it, or nobody may
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(folder)
    return folder
