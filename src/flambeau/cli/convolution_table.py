"""`flambeau inspect --conv`: sizes of several convolutions, and where their windows are."""

import dataclasses
import re
from typing import TYPE_CHECKING, Any

from flambeau.cli.table import print_json, print_table
from flambeau.errors import InputError, refusing

if TYPE_CHECKING:
    from flambeau.recipes.models.convolution_sizes import Window

_CONV = (
    r"((?P<size>\d{1,6}),)?k(?P<kernel>\d{1,6})(,s(?P<stride>\d{1,6}))?(,p(?P<padding>\d{1,6}))?"
    r"(,d(?P<dilation>\d{1,6}))?(,(?P<transposed>t))?"
)
_NUMBERS = ("kernel", "stride", "padding", "dilation")


def print_convolutions(words: list[str], *, as_json: bool) -> int:
    """Print sizes of successive convolutions, and where their windows are; returns the exit code."""
    from flambeau.recipes.models.convolution_sizes import chain, picture

    size, windows = _windows(words)
    with refusing("--conv"):
        stages = chain(size, windows)
    if as_json:
        print_json([{"input": size, "stages": [dataclasses.asdict(stage) for stage in stages]}])
        return 0
    columns = ("window", "input", "output", "unused", "receptive field", "jump")
    sizes = [size, *(stage.size for stage in stages)]
    cells = (
        (
            word,
            str(before),
            str(stage.size),
            str(stage.unused),
            f"{stage.sees:g}",
            f"{stage.jump:g}",
        )
        for word, before, stage in zip(words, sizes, stages, strict=False)
    )
    print_table(columns, cells, right=columns[1:])
    for before, window in zip(sizes, windows, strict=False):
        print(f"\n{picture(before, window)}")
    return 0


def _windows(words: list[str]) -> "tuple[int, list[Window]]":
    """The size of the input, and the windows of --conv."""
    from flambeau.recipes.models.convolution_sizes import Window

    size = 0
    windows = []
    for number, word in enumerate(words):
        match = re.fullmatch(_CONV, word)
        if match is None or (match["size"] is None) != bool(number):
            example = "k3,s2,p1 (the input comes from the one before)" if number else "224,k7,s2,p3"
            raise InputError(
                f"--conv {word}: give it as {example}, with d2 for a dilation, t for transposed"
            )
        size = int(match["size"]) if match["size"] else size
        given: dict[str, Any] = {
            name: int(match[name]) for name in _NUMBERS if match[name] is not None
        }
        with refusing(f"--conv {word}"):
            windows.append(Window(**given, transposed=match["transposed"] is not None))
    return size, windows
