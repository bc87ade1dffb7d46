"""A trial overwrites no checkpoint: what `torch.save` is to write over goes beside it, and is removed."""

import functools
import os
from pathlib import Path
from typing import Any

import torch

LIST = "saved_files"
"""In the folder of a trial: files that the trial has made, one a line."""


def protect_files(folder: Path) -> None:
    """From here on in this process.

    Args:
        folder: of the trial.
    """
    save = torch.save
    ours: set[str] = set()

    @functools.wraps(save)
    def save_beside(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(f, str | os.PathLike):
            save(obj, f, *args, **kwargs)
            return
        file = Path(f).absolute()
        if file.exists() and f"{file}" not in ours:
            file = file.with_name(f"{file.name}.flambeau-doctor")
        if f"{file}" not in ours:
            ours.add(f"{file}")
            with (folder / LIST).open("a", encoding="utf-8") as names:
                names.write(f"{file}\n")
        save(obj, file, *args, **kwargs)

    torch.save = save_beside
