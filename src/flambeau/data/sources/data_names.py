"""Data sets by name instead of path, and where they are kept."""

import os
from pathlib import Path

from flambeau.data.stores.address import SCHEMES, address_of, is_address, without_secrets
from flambeau.errors import InputError

NAMED = ("torchvision:", "hf:")
_OTHER_SCHEMES = {"ftp:", "hdfs:"}
_NAMES = " or ".join(f"{prefix}NAME" for prefix in NAMED)


def is_named(data: str | Path) -> bool:
    """Whether DATA is a data set by name, not a path."""
    return str(data).startswith(NAMED) and not is_address(data)


def data_text(data: str | Path) -> str:
    """DATA as the user has written it; a `Path` has lost a slash of an address."""
    return address_of(data) if is_address(data) else str(data)


def data_home() -> Path:
    """$FLAMBEAU_DATA, else ~/.cache/flambeau/data; it may not exist."""
    return Path(os.environ.get("FLAMBEAU_DATA") or "~/.cache/flambeau/data").expanduser()


def check_download(download: bool, *data: str | Path) -> None:
    """Refuse `download` unless one of `data` is a data set by name."""
    if download and not any(map(is_named, data)):
        given = f" with {data[0]}" if data else ""
        raise InputError(f"download has no effect{given}, only with {_NAMES}: leave it out")


def refuse_output(path: str | Path, what: str) -> None:
    """Raise InputError for an address where something is to be written."""
    if is_address(path):
        raise InputError(
            f"{what} {without_secrets(str(path))} is an address in a store, where nothing is written yet\n"
            "Name a folder or file of a disk, and copy it to the store afterwards"
        )


def refuse_address(path: Path) -> None:
    """Raise InputError for an address where a path is needed."""
    if is_address(path):
        raise InputError(
            f"{address_of(path)} is an address in a store, which is not read here\n"
            "Copy it to a disk, and give the file or folder"
        )
    if any(part in _OTHER_SCHEMES for part in path.parts):
        raise InputError(
            f"{path} is an address of a kind that is not read; read are {', '.join(SCHEMES)}\n"
            "Fetch it yourself, and give the file or folder"
        )
