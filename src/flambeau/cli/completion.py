"""`flambeau completion`: the script that lets a shell complete commands, flags, choices and paths."""

import argparse
from collections.abc import Iterator

from flambeau.terminal import print_text

HELP = "print the script that completes commands in bash, zsh or fish"

_SHELLS = ("bash", "zsh", "fish")
_FOLDERS = ("DIR", "RUN")  # by the metavar
_FILES = ("DATA", "WHAT", "SRC", "DST", "IN", "OUT", "FILE", "RUN|FILE", "DEST")
_FILE_FLAGS = ("--model", "--weights", "--teacher")  # FILE.py:FUNCTION, weights, a run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", choices=_SHELLS, help=", ".join(_SHELLS))


def run(arguments: argparse.Namespace) -> int:
    import shtab

    from flambeau.cli.command import build_parser

    parser = build_parser()
    for action in list(_actions(parser)):
        name = str(action.metavar)
        if name in _FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif name in _FILES or set(_FILE_FLAGS) & set(action.option_strings):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif (choices := _choices(action)) is not None:
            action.choices = choices
    print_text(shtab.complete(parser, shell=arguments.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Those of all commands that the help shows."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from _actions(child)
        elif action.help != argparse.SUPPRESS:
            yield action


def _choices(action: argparse.Action) -> list[str] | None:
    """Possible values, if the command checks them itself."""
    from flambeau.cli.recipe_search import recipe_files
    from flambeau.cli.runs import COLUMNS
    from flambeau.run.folder.summary import STATES

    name = action.metavar if isinstance(action.metavar, str) else ""
    if name.startswith("{"):
        return name.strip("{}").split(",")
    if name == "NAME" and not action.option_strings:  # of a recipe
        return [path.stem for path in recipe_files()]
    known: dict[str, list[str]] = {"STATE": [*STATES], "COLUMN": [*COLUMNS]}
    return known.get(name)
