"""The default folder of a run: runs/NAME, after its data."""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flambeau.data.stores.address import is_address, name_of
from flambeau.errors import InputError
from flambeau.trainer.settings.settings import FIELDS, Settings

EMBEDDED_NAME = "fashion-mnist"
_PACKED_FOLDERS = (".lmdb", ".zarr", ".n5")  # suffixes to drop, unlike that of photos.v2


def given_settings(settings: Settings, given: Mapping[str, Any]) -> dict[str, Any]:
    """The given settings in canonical spelling, without those that equal the default 'auto'."""
    names = dict.fromkeys(("duration", *given))
    values = {name: getattr(settings, name) for name in names}
    return {
        name: v
        for name, v in values.items()
        if v is not None and not v == FIELDS[name].default == "auto"
    }


def default_folder(settings: Settings, given: Mapping[str, Any]) -> Path:
    """runs/NAME, with a hash of the given settings, so that each choice has its own folder."""
    # FILE.py:FUNCTION, torchvision:NAME, hf:USER/NAME:CONFIG: Windows and archives allow no colon in a name.
    data_name = (settings.data or EMBEDDED_NAME).replace(".py:", "-")
    if data_name.startswith("hf:"):
        data_name = data_name.replace(":", "-")
    if is_address(data_name):
        last = name_of(data_name.rstrip("/"))
        data_name = re.sub(r"[-_.]?(\{[^{}]*\}|\*)", "", last) or "store"
    data = Path(data_name.replace("torchvision:", "torchvision-"))
    is_plain = data.is_dir() and data.suffix not in _PACKED_FOLDERS
    name = (data.name if is_plain else data.stem).replace(":", "-")
    kept = {k: v for k, v in given.items() if k != "data" and not FIELDS[k].metadata["may_change"]}
    if kept:
        name += "-" + hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:8]
    return Path("runs") / name


def check_outside(folder: Path, data: str | None) -> None:
    """Refuse a run folder within the folder of its data."""
    if data is not None and not is_address(data) and folder.resolve().is_relative_to(data):
        raise InputError(
            f"the run folder {folder} would lie within the data {data}, as one more class of them; "
            "name another one with --out"
        )
