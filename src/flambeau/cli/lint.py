"""`flambeau lint`: old PyTorch code made new; the package flambeau_lint does it, which needs no torch."""

import argparse

from flambeau.errors import InputError

HELP = "find and fix what a newer torch has removed, deprecated or changed in your scripts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from flambeau_lint import command

    command.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """0 if nothing was found, 1 if something was."""
    from flambeau_lint.command import run as run_lint
    from flambeau_lint.settings import WrongUsage

    try:
        return run_lint(arguments)
    except WrongUsage as error:
        raise InputError(str(error)) from None
