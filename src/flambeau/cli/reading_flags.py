"""What commands that read images share: flags on reading, and how lines are printed."""

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from flambeau.errors import InputError
from flambeau.provenance import is_run
from flambeau.terminal import say

if TYPE_CHECKING:
    from flambeau.trainer.prediction.ensemble import Model


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


def add_data_copy(parser: argparse._ActionsContainer) -> None:
    """Where the images of a run are, if not where it has read them."""
    parser.add_argument(
        "--data",
        metavar="DATA",
        help="your own copy of the images (default: where the run read them)",
    )


def add_cache_flags(parser: argparse._ActionsContainer) -> None:
    """Where data in a store are kept, as of `flambeau train`; see `cache_of_flags`."""
    parser.add_argument(
        "--cache",
        metavar="DIR",
        help="where data in a store are kept (default: $FLAMBEAU_CACHE, else ~/.cache/flambeau/store)",
    )
    parser.add_argument(
        "--cache-size",
        metavar="SIZE",
        help="most that is kept of them, such as 200GB; what was not used for longest is removed first "
        "(default: 50GB)",
    )


@contextlib.contextmanager
def cache_of_flags(arguments: argparse.Namespace, *data: str | Path | None) -> Iterator[None]:
    """Within the context data in a store are kept where the flags say.

    InputError: no data in a store, so no effect; or no size.
    """
    flag = "cache" if arguments.cache is not None else "cache_size"
    value = getattr(arguments, flag)
    if value is None:
        yield
        return
    from flambeau.data.stores.address import is_address
    from flambeau.data.stores.block_cache import (
        DEFAULT_BYTES,
        CacheOptions,
        cache_chosen,
        parse_bytes,
    )

    flag = f"--{flag.replace('_', '-')}"
    given = [one for one in data if one is not None]
    if not any(map(is_address, given)):
        raise InputError(
            f"{flag} {value} is for data in a store (s3://..., https://...), and has no effect with "
            f"{given[0] if given else 'these data'}: leave it out"
        )
    size = DEFAULT_BYTES
    if arguments.cache_size is not None:
        size = parse_bytes(arguments.cache_size, name="--cache-size")
    folder = None if arguments.cache is None else Path(arguments.cache)
    with cache_chosen(CacheOptions(folder, size)):
        yield


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


def add_others(parser: argparse.ArgumentParser) -> None:
    """Further runs that answer together with the first."""
    parser.add_argument(
        "--with",
        dest="others",
        action="append",
        default=[],
        metavar="RUN",
        help="a further run of the same classes; all answer together, by the mean of their probabilities, or "
        "of their numbers; may be given several times",
    )


def say_calibrated(model: "Model") -> None:
    """Say that probabilities are at the temperature that an evaluation has fitted."""
    from flambeau.trainer.prediction.ensemble import members_of

    several = [] if len(members_of(model)) == 1 else [model.calibration]
    for one in (*(member.calibration for member in members_of(model)), *several):
        if one is None or one.temperature == 1:  # of an export, whose graph has divided by it
            continue
        say(
            f"probabilities are calibrated: temperature {one.temperature:.4g}, fitted on {one.images} images"
        )


def check_no_run(*data: str | None) -> None:
    """Refuse a run where data are expected: several runs are given by --with."""
    for one in data:
        if one is not None and is_run(Path(one)):
            raise InputError(
                f"{one} is the folder of a run, and no data: several runs answer together by --with {one}"
            )


def check_at_least(arguments: argparse.Namespace, **least: int) -> None:
    """Refuse numbers that are too small, by the names of their flags."""
    for name, smallest in least.items():
        given = getattr(arguments, name)
        if given is not None and given < smallest:
            raise InputError(f"--{name.replace('_', '-')} must be at least {smallest}, got {given}")
