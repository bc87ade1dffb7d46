"""Checks that a file named by the user can be written, before the work for it begins."""

from collections.abc import Sequence
from pathlib import Path

from flambeau.errors import InputError


def check_file(flag: str, path: Path, *, endings: Sequence[str], what: str, example: str) -> None:
    """Check name and folder of a flag's file, which needs one of the endings, in any case.

    `what` is a sentence on such files for the message, `example` a name for one.
    """
    if not path.name.lower().endswith(tuple(endings)):
        raise InputError(f"{flag} {path}: {what}; name it such as {example}")
    if not path.parent.is_dir():
        raise InputError(f"{flag} {path}: the folder {path.parent} does not exist")
    if path.is_dir():
        raise InputError(f"{flag} {path} is a folder; name a file in it: {path / example}")


def check_page(flag: str, path: Path, *, example: str, instead: str, force: bool = False) -> None:
    """Check an HTML file, which may replace only another report, unless by `force`.

    `instead`: what to do if another file has the name.
    """
    from flambeau.run.folder.report_file import is_report

    check_file(
        flag, path, endings=(".html", ".htm"), what="a report is an HTML file", example=example
    )
    if path.exists() and not force and not is_report(path):
        raise InputError(f"{path} exists and is no report of flambeau; {instead}")
