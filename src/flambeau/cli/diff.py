"""`flambeau diff`: two runs, the first step in which they differ, and why."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flambeau.cli.reading_flags import add_trust
from flambeau.cli.table import print_json
from flambeau.errors import InputError
from flambeau.run.folder.store_run import run_here
from flambeau.run.options.portable_bits import hold_for
from flambeau.terminal import print_text, printable, say

if TYPE_CHECKING:
    from flambeau.compare.run_comparison import RunComparison

HELP = "compare two runs: the first step in which they part, and why"

_MAX_TENSORS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("runs", metavar="RUN", nargs=2, help="the folder of a run; the older one first")
    add(
        "--loss",
        action="store_true",
        help="metrics.jsonl alone, as a Markdown table for a pull request: 'identical for N steps', or the "
        "first difference",
    )
    add(
        "--replay",
        action="store_true",
        help="run both again from where they were equal, for about two minutes at most, and name the first "
        "step, module and tensor that differ; needs their data, and runs code that they name, such as "
        "--model FILE.py:FUNCTION",
    )
    add("--json", action="store_true", help="one JSON object")
    add_trust(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print what differs; 1 if anything does."""
    left, right = (run_here(one, say) for one in arguments.runs)
    if arguments.loss and arguments.replay:
        raise InputError(
            "--loss looks at metrics.jsonl alone, and --replay trains: give one of them"
        )
    for run in (left, right):
        hold_for(run)
    if arguments.loss:
        return _loss(left, right, as_json=arguments.json)
    from flambeau.compare.comparison_text import verdict
    from flambeau.compare.run_comparison import compare_runs

    comparison = compare_runs(left, right)
    more: dict[str, Any] = {}
    text = verdict(comparison, replayed=arguments.replay)
    if arguments.replay and comparison.has_evidence:
        from flambeau.compare.paired_replay import replay
        from flambeau.compare.replay_text import replay_verdict

        result = replay(comparison, trust=arguments.trust, say=say)
        text += "\n\n" + replay_verdict(comparison, result)
        more = {"replay": result.as_json()}
    if arguments.json:
        print_json([{**comparison.as_json(), **more, "verdict": text}])
    else:
        _print(comparison, text)
    if not comparison.has_evidence:
        raise InputError(f"{left} and {right} have no step in common that could be compared")
    return 0 if comparison.is_same else 1


def trial_outputs(arguments: argparse.Namespace) -> list[Path] | None:
    """A replay runs the code that the runs name, and writes nothing."""
    return [] if arguments.replay else None


def _loss(left: Path, right: Path, *, as_json: bool) -> int:
    from flambeau.compare.line_difference import compare_lines, markdown_table
    from flambeau.compare.recorded_facts import read_facts

    paths = [read_facts(path).folder.metrics for path in (left, right)]
    lines = compare_lines(*paths)
    if not lines.num_figures:
        raise InputError(
            f"{paths[0]} and {paths[1]} have no figure of the same steps in common: give both runs the same "
            "log_every, and let both write a line"
        )
    if as_json:
        print_json(
            [{"runs": [str(left), str(right)], "identical": lines.is_same, **lines.as_json()}]
        )
    else:
        print_text(markdown_table(lines, (str(left), str(right))))
    return 0 if lines.is_same else 1


def _print(comparison: "RunComparison", text: str) -> None:
    """The facts, one line each, and the verdict."""
    from flambeau.compare.comparison_text import fact_text, figure_line, listed_steps

    _say(f"{comparison.runs[0].folder.path} and {comparison.runs[1].folder.path}")
    for kind in ("setting", "data", "environment", "history"):
        for matters in (True, False):
            facts = [f for f in comparison.facts if f.kind == kind and f.matters is matters]
            note = "" if matters else ", without effect on the numbers"
            if facts:
                _say(f"  {kind}{note}: {'; '.join(map(fact_text, facts))}")
    if comparison.sample is not None:
        _say(f"  first sample that differs: {comparison.sample.text}")
    lines = comparison.lines
    if lines.num_figures:
        same = f"identical for {lines.identical_steps} steps" if lines.identical_steps else ""
        first = "" if lines.first is None else figure_line(lines.first)
        _say(f"  metrics.jsonl: {', then '.join(filter(None, (same, first)))}")
    if comparison.equal_steps:
        _say(f"  checkpoints: equal to the bit at {listed_steps(comparison.equal_steps)}")
    if comparison.state is not None:
        _print_state(comparison)
    for paragraph in ("", *text.split("\n")):
        _say(paragraph)


def _print_state(comparison: "RunComparison") -> None:
    from flambeau.compare.comparison_text import value_text

    state = comparison.state
    assert state is not None
    _say(
        f"  checkpoint of step {state.step}: {len(state.tensors)} of {state.num_tensors} tensors differ"
    )
    for tensor in state.tensors[:_MAX_TENSORS]:
        _say(f"    {tensor}")
    if len(state.tensors) > _MAX_TENSORS:
        _say(f"    and {len(state.tensors) - _MAX_TENSORS} more (--json lists them)")
    for name, values in list(state.values.items())[:_MAX_TENSORS]:
        _say(f"    {name}: {value_text(values[0])} and {value_text(values[1])}")


def _say(text: str) -> None:
    """Print a line with text from files."""
    print_text(printable(text))
