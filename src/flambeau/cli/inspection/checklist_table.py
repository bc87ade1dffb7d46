"""`flambeau inspect --checklist`: what the usual advice changes for a model, or a run, on this machine."""

import contextlib
import dataclasses
import sys

from flambeau.cli.inspection.steps_here import Source, steps_here
from flambeau.cli.inspection.time_text import with_spread
from flambeau.cli.table import print_json, print_table
from flambeau.terminal import say


def print_checklist(source: Source, *, as_json: bool) -> int:
    """Measure, and print a line per piece of advice; returns the exit code."""
    from flambeau.inspection.timing.checklist import checklist
    from flambeau.inspection.timing.step_profile import device_name

    say("measuring, a minute or two ...")
    with contextlib.redirect_stdout(sys.stderr), steps_here(source) as steps:
        run = steps if source.run is not None else None
        args = source.args if run is None else run.example
        found = checklist(steps.model, args, source.kwargs, device=steps.device, run=run)
        device = device_name(steps.device)
    if as_json:
        print_json([dataclasses.asdict(found) | {"device": device}])
        return 0
    print(f"{found.about}\non {device}\n")
    rows = [("as it is", "", with_spread(found.base), "1.00", "")]
    rows += [
        (
            one.name,
            one.how,
            "" if one.time is None else with_spread(one.time),
            "" if one.times is None else f"{one.times:.2f}",
            one.verdict,
        )
        for one in found.advice
    ]
    print_table(("advice", "how", "ms", "times", "here"), rows, right=("ms", "times"))
    print(
        "\nms per step, of num_workers per batch: the median, and between which two values half of them are"
    )
    return 0
