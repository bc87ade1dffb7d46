"""The folder of a run that was given none: runs/NAME after its data."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flambeau.trainer.settings.settings import FIELDS, Settings

EMBEDDED_NAME = "fashion-mnist"
_PACKED_FOLDERS = (".lmdb", ".zarr", ".n5")  # whose suffix is no part of a name: photos.v2 is one


def given_settings(settings: Settings, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that were given, in their one spelling; a default of 'auto' says as little as none."""
    names = dict.fromkeys(("duration", *given))
    values = {name: getattr(settings, name) for name in names}
    return {
        name: v
        for name, v in values.items()
        if v is not None and not v == FIELDS[name].default == "auto"
    }


def default_folder(settings: Settings, given: Mapping[str, Any]) -> Path:
    """runs/NAME, with a hash of the settings that were given, so that each choice has its folder.

    Args:
        settings: canonical.
        given: as `given_settings` gives them.
    """
    # Of FILE.py:FUNCTION and torchvision:NAME both; Windows and archives allow no colon in a name.
    name_of_data = (settings.data or EMBEDDED_NAME).replace(".py:", "-")
    if name_of_data.startswith("hf:"):
        name_of_data = name_of_data.replace(
            ":", "-"
        )  # of hf:USER/NAME:CONFIG the name and the CONFIG
    data = Path(name_of_data.replace("torchvision:", "torchvision-"))
    is_plain = data.is_dir() and data.suffix not in _PACKED_FOLDERS
    name = (data.name if is_plain else data.stem).replace(":", "-")
    kept = {k: v for k, v in given.items() if k != "data" and not FIELDS[k].metadata["may_change"]}
    if kept:
        name += "-" + hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:8]
    return Path("runs") / name
