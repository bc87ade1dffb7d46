"""paused.json: after how many epochs a run has stopped because FLAMBEAU_PAUSE_AFTER said so."""

import json
from pathlib import Path

from flambeau.recipes.checkpoints.atomic_checkpoint import write_file
from flambeau.run.folder.json_file import json_table, whole_number

_NAME = "paused.json"


def write_pause(run: Path, epochs: int) -> None:
    """Note that everything up to the end of these epochs is done, their evaluation included."""
    write_file(run / _NAME, json.dumps({"epochs": epochs}).encode() + b"\n")


def paused_after(run: Path) -> int:
    """The epochs of the last pause; 0 without one."""
    return whole_number(json_table(run / _NAME).get("epochs")) or 0
