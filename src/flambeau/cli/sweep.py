"""`flambeau sweep`: trains many choices of settings and finds the best."""

import argparse
import contextlib
import io
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flambeau.cli.command import check
from flambeau.cli.launch import number_of_procs
from flambeau.cli.table import print_json, print_table
from flambeau.cli.train import given_settings_of
from flambeau.errors import InputError
from flambeau.run.options.durations import parse_seconds
from flambeau.terminal import clock, print_text, say

if TYPE_CHECKING:
    from flambeau.experiments.description import Described, Wanted
    from flambeau.experiments.result import SweepResult, Trial
    from flambeau.experiments.sweeper import Experiment

HELP = "train many choices of settings, and find the best"
TAKES_REST = True
"""What is no flag of this command belongs to train."""

_SHOWN = 10  # trials of the table
_EXAMPLES = """\
flambeau sweep photos/ --set lr=1e-4..1e-1:log --set model=resnet18,resnet34 --trials 40
flambeau sweep photos/ --set lr=1e-4..1e-1:log --epochs 27 --halving --trials 40
flambeau sweep photos/ --set mixup=0,0.2 --seeds 3
flambeau sweep photos.csv --folds 5 --group patient
flambeau sweep photos/ --set mixup=0,0.2 --test 10%
flambeau sweep --set lr=1e-4..1e-1:log -- python train.py --lr {lr} --out {out}

The same command again goes on, to the same trials and the same bits.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "flambeau sweep --set NAME=... [FLAGS] ([arguments of flambeau train] | -- COMMAND ...)"
    )
    parser.epilog = _EXAMPLES
    _add_search_flags(parser)
    add = parser.add_argument
    add(
        "--procs",
        metavar="N|auto",
        default="auto",
        help="how many trials this machine trains at once (default: one per GPU)",
    )
    add("--out", metavar="DIR", help="folder of the sweep (default: runs/NAME-sweep-HASH)")
    add(
        "--dry-run",
        action="store_true",
        help="say how many trials and epochs, and the time and disk that they will take; train none",
    )
    add("--json", action="store_true", help="print one JSON object per trial, for programs")


def _add_search_flags(parser: argparse.ArgumentParser) -> None:
    """Those that say what the sweep is."""
    add = parser.add_argument
    add(
        "--set",
        action="append",
        default=[],
        metavar="NAME=...",
        help="a setting that is searched: a range such as 1e-4..1e-1:log, or values such as a,b,c; may "
        "be given several times",
    )
    add(
        "--trials",
        type=int,
        metavar="N",
        help="how many choices are tried (default: 20, or all where there are fewer)",
    )
    add(
        "--sampler",
        default="tpe",
        metavar="{tpe,random,grid}",
        help="what proposes choices: from the results so far, at random, or all (default: tpe)",
    )
    add(
        "--halving",
        type=int,
        nargs="?",
        const=3,
        default=0,
        metavar="N",
        help="stop most trials early: at each rung one of N goes on (default: all are trained to the end; "
        "without N: 3)",
    )
    add(
        "--at-once",
        type=int,
        default=4,
        metavar="N",
        help="how many trials can run at once, on all machines together; with another number the sweep makes "
        "other choices (default: 4)",
    )
    add(
        "--seeds",
        type=int,
        default=1,
        metavar="N",
        help="train each choice with so many seeds, and compare the means (default: 1)",
    )
    add(
        "--budget", metavar="TIME", help="end after this time, such as 8h; the same command goes on"
    )
    add(
        "--folds",
        type=int,
        default=0,
        metavar="N",
        help="cross-validate each choice: so many runs, each with another part of the images held out; with "
        "--group COLUMN groups stay together (default: the usual hold-out)",
    )
    _add_script_flags(parser)


def _add_script_flags(parser: argparse.ArgumentParser) -> None:
    """Those of a sweep over a script."""
    add = parser.add_argument
    add(
        "--figure",
        metavar="NAME",
        help="of a script: what is compared, by its name in a line of JSON that it prints, or as its Run in "
        "{out} chooses by it (default: val_accuracy)",
    )
    add(
        "--mode",
        choices=("max", "min"),
        help="which values of it are better (default: by its name)",
    )


def run(arguments: argparse.Namespace) -> int:
    wanted = _wanted(arguments)
    budget_s = (
        None if arguments.budget is None else parse_seconds(arguments.budget, name="--budget")
    )
    procs = None if arguments.procs == "auto" else number_of_procs(arguments.procs)
    from flambeau.experiments.api import run_sweep
    from flambeau.experiments.description import describe

    described = describe(wanted)
    if arguments.dry_run:
        _say_plan(described)
        return 0
    out = None if arguments.out is None else Path(arguments.out)
    with contextlib.redirect_stdout(io.StringIO()) if arguments.json else contextlib.nullcontext():
        result = run_sweep(described, out, procs=procs, budget_s=budget_s, say=say)
    _report(result, described, as_json=arguments.json)
    return 1 if result.is_over and result.best is None else 0


def _wanted(arguments: argparse.Namespace) -> "Wanted":
    rest = list(arguments.rest)
    command: tuple[str, ...] | None = None
    if "--" in rest:
        at = rest.index("--")
        rest, command = rest[:at], tuple(rest[at + 1 :])
        if not command:
            raise InputError(
                "nothing to run behind --: flambeau sweep --set ... -- python train.py ..."
            )
    given = check(["train", *rest])
    for name in ("fresh", "find_lr", "replay_step", "json_lines"):
        if getattr(given, name):
            raise InputError(
                f"leave --{name.replace('_', '-')} out: it is of one run, and not of a sweep"
            )
    settings = given_settings_of(given)
    epochs = settings.pop("epochs", None) if command is not None else None
    from flambeau.experiments.description import Wanted

    return Wanted(
        settings,
        _space(arguments.set),
        command,
        trials=arguments.trials,
        sampler=arguments.sampler,
        halving=arguments.halving,
        at_once=arguments.at_once,
        seeds=arguments.seeds,
        folds=arguments.folds,
        figure=arguments.figure,
        mode=arguments.mode,
        epochs=epochs,
        trust=given.trust,
    )


def _space(texts: Sequence[str]) -> dict[str, str]:
    space: dict[str, str] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        name = name.strip().lstrip("-").replace("-", "_")
        if not equals or not name or not values.strip():
            raise InputError(f"--set {text:.100}: give NAME=LOW..HIGH or NAME=VALUE,VALUE")
        if name in space:
            raise InputError(f"--set {name} is given twice")
        space[name] = values
    return space


def _say_plan(described: "Described") -> None:
    """How many trials there will be, and of those of `flambeau train` what they will take here."""
    from flambeau.experiments.description import counted, planned_epochs

    experiment = described.experiment
    rules = experiment.rules
    members = len(experiment.members)
    trials = counted(rules.trials, "trial")
    print_text(f"{trials}, in {described.folder} unless --out names another folder")
    for name, dimension in experiment.space.items():
        print_text(f"  {name}: {dimension}")
    if experiment.command is not None:
        return
    steps, epochs = planned_epochs(rules)
    starts = counted(steps * members, "time")
    print_text(f"a run is begun or goes on {starts}, {counted(epochs * members, 'epoch')} in all")
    whole = rules.trials * rules.rungs[-1] * members
    if epochs * members < whole:
        print_text(f"without halving it were {whole}")
    _say_cost(experiment)


def _say_cost(experiment: "Experiment") -> None:
    """Time and disk, as dry runs of the first trials take them."""
    from flambeau.experiments.estimate import estimate

    found = estimate(experiment)
    for failure in found.failures:
        print_text(f"a trial will fail {failure}")
    measured = ", ".join(f"{seconds:.3g}" for seconds in found.epoch_s)
    print_text(f"an epoch of the first trials takes {measured} s here, without evaluations")
    print_text(
        f"time: about {clock(found.total_s)} for one run after the other; less on several GPUs"
    )
    print_text(f"disk: at most {found.disk_bytes / 2**20:.0f} MiB for all run folders")


def _report(result: "SweepResult", described: "Described", *, as_json: bool) -> None:
    rows = sorted(result.trials, key=lambda trial: _rank(trial.value, trial.epochs, described))
    if as_json:
        print_json([_facts(trial, result) for trial in rows])
        return
    spreads = [] if len(described.experiment.members) == 1 else ["std", "95 %", "beside the best"]
    print_table(
        ["trial", result.figure, *spreads, "epochs", "state", "settings"],
        [_cells(trial, has_spread=bool(spreads)) for trial in rows[:_SHOWN]],
        right=("trial", result.figure, "std", "epochs"),
    )
    if spreads and (shown := next((trial.spread for trial in rows if trial.spread), None)):
        print_text(f"intervals: {shown.how}")
    if len(rows) > _SHOWN:
        print_text(f"and {len(rows) - _SHOWN} more: --json prints all")
    for line in result.importance.lines() if result.importance and len(rows) > 1 else []:
        print_text(line)
    if not result.is_over:
        print_text("the time of --budget is over: the same command goes on")
    best = result.best
    if best is None:
        failed = next((trial for trial in rows if trial.reason), None)
        why = "" if failed is None else f"; the first failed so: {failed.reason}"
        print_text(f"no trial was trained to its end{why}")
        return
    words = f" ({best.words})" if best.words else ""
    print_text(f"best: trial {best.number}{words}, {result.figure} {best.value:.4f}")
    if described.experiment.command is None:
        run = shlex.quote(str(best.runs[0]))
        others = f"    and {len(best.runs) - 1} beside it" if len(best.runs) > 1 else ""
        print_text(f"its run: {run}{others}")
        print_text(f"next: flambeau predict {run} IMAGE...")
        file = shlex.quote(str(result.folder / "best.toml"))
        print_text(f"      flambeau train --config {file} --out NEW")
        _say_test(result.folder, described)


def _say_test(folder: Path, described: "Described") -> None:
    """How often the images of --test were looked at."""
    if "test" not in described.experiment.settings:
        return
    from flambeau.trainer.prediction.final_test import FILE, look_lines

    lines = look_lines(folder / FILE)
    for line in lines:
        print_text(line)
    if not lines:
        print_text(
            f"      flambeau evaluate {shlex.quote(str(folder))} --test, once, when nothing is left to choose"
        )


def _cells(trial: "Trial", *, has_spread: bool) -> list[str | None]:
    value = None if trial.value is None else f"{trial.value:.4f}"
    cells = [str(trial.number), value]
    if has_spread:
        spread = trial.spread
        beside = {True: "no difference seen", False: "differs", None: None}[trial.is_best_seen]
        numbers = (
            None
            if spread is None
            else (f"{spread.std:.4f}", f"{spread.low:.4f} to {spread.high:.4f}")
        )
        cells += [*(numbers or (None, None)), beside]
    return [*cells, str(trial.epochs), trial.state, trial.words]


def _rank(value: float | None, epochs: int, described: "Described") -> tuple[int, float]:
    """Trials that were trained longer come first, the best of them at the head."""
    if value is None:
        return 1, 0.0
    sign = -1 if described.experiment.rules.mode == "max" else 1
    return -epochs, sign * value


def _facts(trial: Any, result: "SweepResult") -> Mapping[str, Any]:
    facts = asdict(trial)
    return {**facts, "figure": result.figure, "runs": [str(run) for run in trial.runs]}
