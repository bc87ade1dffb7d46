"""`flambeau inspect --memory`: the memory of a training step over its time, as a picture."""

import contextlib
import dataclasses
import sys
from pathlib import Path

from flambeau.cli.inspection.steps_here import Source, steps_here
from flambeau.cli.table import print_json
from flambeau.sandbox.here import outside

_OWNERS = 5  # that are printed


def write_memory(path: Path, source: Source, *, as_json: bool) -> int:
    """Write the picture, and print what lives at the peak; returns the exit code."""
    from flambeau.inspection.graphs.picture import size_text
    from flambeau.inspection.timing.memory_picture import svg_of_memory
    from flambeau.inspection.timing.memory_timeline import memory_timeline
    from flambeau.recipes.checkpoints.atomic_checkpoint import write_file

    with contextlib.redirect_stdout(sys.stderr), steps_here(source) as steps:
        found = memory_timeline(steps)
    write_file(outside(path), svg_of_memory(found).encode())
    if as_json:
        print_json([dataclasses.asdict(found) | {"file": str(path)}])
        return 0
    print(f"{path}: {found.about}")
    before = (
        f"above {size_text(found.there_before)} of parameters and buffers and the optimizer's state"
    )
    print(f"{size_text(found.peak_bytes)} at the peak, {before}; who allocated it:")
    for owner in found.owners[:_OWNERS]:
        print(f"  {size_text(owner.size_bytes):>10}  {owner.name}")
    return 0
