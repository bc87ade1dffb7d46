"""For code that may run inside a trial: whether it does, and where it puts its run."""

import hashlib
import os
from pathlib import Path

MARK = "FLAMBEAU_TRIAL"
"""Environment variable of a trial's processes: the folder of the trial."""

RUNS = "runs"
"""In that folder, a folder for each run that is trained inside."""


def in_trial() -> bool:
    """Whether doctor or tune runs this process to time it."""
    return MARK in os.environ


def folder_for_run(path: Path) -> Path:
    """The folder in which a run is trained: in a trial an empty one, not the user's run.

    Example:
        >>> folder_for_run(Path("runs/mine")).name
        'mine'
    """
    if not in_trial():
        return path
    runs = Path(os.environ[MARK]) / RUNS
    if path.is_relative_to(runs):
        return path
    return runs / hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:16]
