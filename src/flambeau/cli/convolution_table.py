"""`flambeau inspect --conv`: sizes of several convolutions, and where their windows are."""

import dataclasses
import re
from typing import TYPE_CHECKING, Any

from flambeau.cli.table import print_json, print_table
from flambeau.errors import InputError, refusing
from flambeau.terminal import print_text

if TYPE_CHECKING:
    from flambeau.recipes.models.convolution_sizes import Window

_NUMBERS = {
    "k": "kernel",
    "s": "stride",
    "p": "padding",
    "d": "dilation",
    "o": "output_padding",
}
_WORDS = {"t": "transposed", "ceil": "ceil_mode"}


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
        print_text(f"\n{picture(before, window)}")
    return 0


def _windows(words: list[str]) -> "tuple[int, list[Window]]":
    """The size of the input, and the windows of --conv."""
    from flambeau.recipes.models.convolution_sizes import Window

    size = 0
    windows = []
    for number, word in enumerate(words):
        head, _, parts = word.partition(",") if number == 0 else ("0", "", word)
        given = _arguments(parts)
        if given is None or not re.fullmatch(r"\d{1,6}", head):
            example = "k3,s2,p1 (the input comes from the one before)" if number else "224,k7,s2,p3"
            raise InputError(
                f"--conv {word}: give it as {example}, with d2 for a dilation, t for transposed, "
                "o1 for its output_padding, ceil for a pooling with ceil_mode"
            )
        size = size if number else int(head)
        with refusing(f"--conv {word}"):
            windows.append(Window(**given))
    return size, windows


def _arguments(text: str) -> dict[str, Any] | None:
    """Arguments of Window from text such as k3,s2,p1; None if it is not so written."""
    given: dict[str, Any] = {}
    for part in text.split(","):
        match = re.fullmatch(r"([kspdo])(\d{1,6})", part)
        name = _NUMBERS[match[1]] if match else _WORDS.get(part)
        if name is None or name in given:
            return None
        given[name] = int(match[2]) if match else True
    return given if "kernel" in given else None
