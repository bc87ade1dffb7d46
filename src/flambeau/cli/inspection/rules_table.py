"""`flambeau inspect --rules`: what channels, groups, branches and element-wise operations cost here."""

import contextlib
import dataclasses
import sys
from typing import TYPE_CHECKING, Any

from flambeau.cli.inspection.time_text import with_spread
from flambeau.cli.table import print_json, print_table
from flambeau.terminal import say

if TYPE_CHECKING:
    from torch import nn

    from flambeau.inspection.design_rules import Finding


def print_findings(
    model: "nn.Module", args: tuple[Any, ...], kwargs: dict[str, Any], *, as_json: bool
) -> int:
    """What of it a model does, and what that costs on this machine; returns the exit code."""
    from flambeau.inspection.design_rules import rule_findings

    with contextlib.redirect_stdout(sys.stderr):  # what the model itself prints
        findings = rule_findings(model, args, kwargs)
    if not as_json:
        print_table(
            ("rule", "of this model", "count", "share", "the largest"),
            [
                (one.rule, one.what, str(one.count), _share(one), ", ".join(one.examples) or None)
                for one in findings
            ],
            right=("count", "share"),
        )
        print()
    return print_rules([dataclasses.asdict(one) for one in findings], as_json=as_json)


def print_rules(findings: list[dict[str, Any]] | None = None, *, as_json: bool) -> int:
    """What it costs on this machine; returns the exit code."""
    from flambeau.inspection.timing.channel_rules import measure_rules
    from flambeau.inspection.timing.step_profile import device_name
    from flambeau.trainer.parts.device import pick_device, use_threads

    use_threads()
    device = pick_device("auto")
    say("measuring, a minute at most ...")
    found = measure_rules(device)
    if as_json:
        rows = [dataclasses.asdict(one) for one in found]
        more = {} if findings is None else {"model": findings}
        print_json([{"device": device_name(device), "variants": rows} | more])
        return 0
    cells = []
    rule = ""
    for one in found:
        cells.append(
            (
                one.rule if one.rule != rule else "",
                one.name,
                f"{one.flops / 1e6:.0f} M",
                with_spread(one.inference),
                f"{one.times_inference:.2f}",
                with_spread(one.training),
                f"{one.times_training:.2f}",
            )
        )
        rule = one.rule
    columns = (
        "rule",
        "at about the same FLOPs",
        "FLOPs",
        "inference ms",
        "times",
        "training ms",
        "times ",
    )
    print_table(columns, cells, right=columns[2:])
    print(f"\non {device_name(device)}; medians, and between which two values half of the runs are")
    return 0


def _share(one: "Finding") -> str | None:
    return None if one.share is None else f"{one.share:.0%} of {one.of}"
