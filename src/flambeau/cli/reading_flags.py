"""What commands that read images share: flags on reading, and how lines are printed."""

import argparse

from flambeau.errors import InputError


def add_reading_flags(parser: argparse.ArgumentParser) -> None:
    """How images are read, and at which size."""
    parser.add_argument(
        "--image-size",
        type=int,
        metavar="N",
        help="side of the images as the model sees them (default: as in training)",
    )
    add_download(parser)
    parser.add_argument(
        "--workers", type=int, default=0, metavar="N", help="processes that read data"
    )
    parser.add_argument(
        "--skip-bad-images", type=int, default=0, metavar="N", help="unreadable images to leave out"
    )


def add_download(parser: argparse._ActionsContainer) -> None:
    """Whether data of known names may be fetched over the network."""
    parser.add_argument(
        "--download",
        action="store_true",
        help="fetch what is missing of torchvision:NAME or hf:NAME",
    )


def add_trust(parser: argparse._ActionsContainer) -> None:
    """Whether code that came with a folder may be run."""
    parser.add_argument(
        "--trust",
        action="store_true",
        help="run the code that the folder names or holds (FILE.py:FUNCTION, a compiled library), also where "
        "nothing shows that you made it here; read that code first",
    )


def add_flip_tta(parser: argparse.ArgumentParser) -> None:
    """Whether the mirror image is classified, too."""
    parser.add_argument(
        "--flip-tta",
        action="store_true",
        help="average the probabilities of each image and its mirror image; twice the time",
    )


def check_at_least(arguments: argparse.Namespace, **least: int) -> None:
    """Refuse numbers that are too small, by the names of their flags.

    Raises:
        InputError: one is too small.
    """
    for name, smallest in least.items():
        given = getattr(arguments, name)
        if given is not None and given < smallest:
            raise InputError(f"--{name.replace('_', '-')} must be at least {smallest}, got {given}")
