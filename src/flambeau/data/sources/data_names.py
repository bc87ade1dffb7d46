"""Data by a name and not by a path: which those are, and what is refused of others."""

from pathlib import Path

from flambeau.errors import InputError

NAMED = ("torchvision:", "hf:")
_SCHEMES = {"http:", "https:", "ftp:", "file:", "s3:", "gs:", "hdfs:"}
_NAMES = " or ".join(f"{prefix}NAME" for prefix in NAMED)


def is_named(data: str | Path) -> bool:
    """Whether DATA is a data set by name, not a path."""
    return str(data).startswith(NAMED)


def check_download(download: bool, *data: str | Path) -> None:
    """Refuse to fetch what is missing of data that have no name.

    Raises:
        InputError: `download`, and all of `data` are paths, or there are none.
    """
    if download and not any(map(is_named, data)):
        given = f" with {data[0]}" if data else ""
        raise InputError(f"download has no effect{given}, only with {_NAMES}: leave it out")


def refuse_address(path: Path) -> None:
    """Refuse what was given as an address in the place of a path.

    Raises:
        InputError: it is one.
    """
    if any(part in _SCHEMES for part in path.parts):
        raise InputError(
            f"{path} is an address: only {_NAMES} is fetched, with --download\n"
            "Fetch it yourself, and give the file or folder"
        )
