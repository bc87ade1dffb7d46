"""`flambeau doctor`: what a training script waits for, and what would make it faster, measured."""

import argparse
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flambeau.cli.table import print_json, print_table
from flambeau.cli.written_file import check_file, check_page
from flambeau.errors import InputError
from flambeau.terminal import say

if TYPE_CHECKING:
    from flambeau.tune.doctor.run_doctor import Diagnosis, Options

HELP = "find what a training script waits for, and measure what would make it faster"
TAKES_REST = True
"""What is no flag of this command belongs to the script, or to train."""

_EXAMPLES = """\
flambeau doctor -- python train.py --lr 0.1
flambeau doctor -- torchrun --nproc-per-node 2 train.py
flambeau doctor photos/ --model resnet18          (the arguments of flambeau train)
flambeau doctor --no-trials --trace steps.json.gz -- python train.py

The script runs for some seconds, several times, and is ended: give it an output folder of its own.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How long, how much, and what is written."""
    parser.usage = "flambeau doctor [FLAGS] (-- COMMAND ... | [arguments of flambeau train])"
    parser.epilog = _EXAMPLES
    add = parser.add_argument
    add("--seconds", type=float, default=8.0, help="how long steps are watched (default: 8)")
    add(
        "--steps",
        type=int,
        default=20,
        help="how many steps at least, if they are quick enough (default: 20)",
    )
    add(
        "--rounds",
        type=int,
        default=3,
        help="pairs of runs for each change that is tried (default: 3)",
    )
    add(
        "--budget",
        default="5min",
        metavar="TIME",
        help="no new trial after this time, such as 90s (default: 5min)",
    )
    add(
        "--limit",
        default="5min",
        metavar="TIME",
        help="what one run may take until its steps are counted (default: 5min)",
    )
    add("--no-trials", action="store_true", help="watch only, and try nothing")
    add("--trace", metavar="FILE", help="write a time line of three steps, for ui.perfetto.dev")
    add("--html", metavar="FILE", help="write all of it as a page, too")
    add("--json", action="store_true", help="print one JSON object instead, for programs")


def run(arguments: argparse.Namespace) -> int:
    """Watch, try, and print."""
    options = _options(arguments)
    from flambeau.tune.doctor.run_doctor import diagnose

    scratch = Path(tempfile.mkdtemp(prefix="flambeau-doctor-"))
    try:
        command = command_of(arguments.rest, scratch, verb="doctor")
        found = diagnose(command, options, say=lambda text: say(f"doctor: {text}"))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if arguments.json:
        print_json([found.as_json()])
    else:
        _print(found)
    if arguments.html is not None:
        from flambeau.train.checkpoints.run_report import write_page
        from flambeau.tune.doctor.page import page_of

        page = page_of(found, shlex.join(arguments.rest).removeprefix("-- "))
        write_page(Path(arguments.html), page)
        say(f"doctor: wrote {arguments.html}")
    return 0


def _options(arguments: argparse.Namespace) -> "Options":
    """Checked, with the files that will be written, before a run of minutes."""
    if not 0.5 <= arguments.seconds <= 3600:
        raise InputError(f"--seconds must be from 0.5 to 3600, got {arguments.seconds:g}")
    for name, low in (("steps", 2), ("rounds", 1)):
        if not low <= (value := getattr(arguments, name)) <= 100_000:
            raise InputError(f"--{name} must be from {low} to 100000, got {value}")
    from flambeau.train.settings.durations import parse_seconds

    if arguments.html is not None:
        check_page(
            "--html", Path(arguments.html), example="doctor.html", instead="name another file"
        )
    if arguments.trace is not None:
        check_file(
            "--trace", Path(arguments.trace), endings=(".json", ".json.gz"),
            what="a time line is a JSON file", example="steps.json.gz",
        )  # fmt: skip
    budget_s = parse_seconds(arguments.budget, name="--budget")
    limit_s = parse_seconds(arguments.limit, name="--limit")
    from flambeau.tune.doctor.run_doctor import Options

    trace = None if arguments.trace is None else f"{Path(arguments.trace).absolute()}"
    return Options(
        seconds=arguments.seconds, steps=arguments.steps, budget_s=budget_s, limit_s=limit_s,
        rounds=0 if arguments.no_trials else arguments.rounds, trace=trace,
    )  # fmt: skip


def command_of(words: Sequence[str], scratch: Path, *, verb: str) -> list[str]:
    """What is run, by the words behind the command's own flags.

    Args:
        words: `-- COMMAND ...`, or arguments of `flambeau train`.
        scratch: an empty folder, in which runs of `flambeau train` go.
        verb: doctor or tune, for messages.

    Raises:
        InputError: they are neither.
    """
    words = list(words)
    if "--" in words:
        at = words.index("--")
        before, words = words[:at], words[at + 1 :]
        if before:
            raise InputError(
                f"unknown flag {before[0]} before the --; flambeau {verb} --help lists all"
            )
        if not words:
            raise InputError(f"nothing to run behind --: flambeau {verb} -- python train.py ...")
        if words[0] not in ("train", "flambeau"):
            return [sys.executable, *words] if words[0].endswith(".py") else words
        words = words[1 + (words[:2] == ["flambeau", "train"]) :]
    from flambeau.cli.command import check

    check(["train", *words])
    for flag in ("--out", "--fresh", "--dry-run", "--json-lines"):
        if any(word == flag or word.startswith(f"{flag}=") for word in words):
            raise InputError(
                f"leave {flag} out: {verb} trains in a folder of its own, and removes it"
            )
    return [sys.executable, "-m", "flambeau", "train", *words, "--out", f"{scratch}/run", "--fresh"]


def _print(found: "Diagnosis") -> None:
    from flambeau.tune.doctor.formatting import percent
    from flambeau.tune.doctor.shares import PHASES

    trial, shares = found.findings.trial, found.findings.shares
    first = trial.trainers[0]
    ranks = f"{len(trial.trainers)} processes, " * (len(trial.trainers) > 1)
    workers = first["loader"].get("num_workers")
    print(
        f"{first['steps']} steps of {1000 * trial.step_s:.3g} ms watched: {ranks}"
        f"{'' if workers is None else f'{workers} workers, '}{first['threads']} threads, {first['device']}\n"
    )
    print(f"{found.verdict[0].upper()}{found.verdict[1:]}.\n")
    rows = [(phase, percent(shares[phase])) for phase in PHASES if shares[phase] >= 0.005]
    print_table(("of a step", "share"), rows, right=("share",))
    if len(found.causes) > 1:
        print("\nAlso:")
        for cause in found.causes[1:]:
            print(f"- {cause.text}")
    if found.tried:
        print()
        print_table(("change", "predicted", "measured", "", "how"), list(_remedies(found)))
        for reason in _reasons(found):
            print(reason)
    for note in found.notes:
        print(f"\n{note}")


def _remedies(found: "Diagnosis") -> list[tuple[str, str, str, str, str]]:
    rows = []
    for one in sorted(found.tried, key=lambda t: -t.gain.times if t.gain else 0.0):
        told = f"{'at most ' * one.remedy.at_most}{one.remedy.predicted:.2f}x"
        if one.gain is None:
            measured, verdict = "-", one.failure.partition("\n")[0]
        else:
            measured, verdict = f"{one.gain.times:.2f}x", one.gain.verdict
        rows.append((one.remedy.name, told, measured, verdict, one.remedy.how))
    return rows


def _reasons(found: "Diagnosis") -> list[str]:
    """What the table shows the first line of only; changes that failed alike are told once."""
    from flambeau.tune.doctor.formatting import in_full, is_longer_than_a_cell

    names: dict[str, list[str]] = {}
    for one in found.tried:
        if one.gain is None and is_longer_than_a_cell(one.failure):
            names.setdefault(one.failure, []).append(one.remedy.name)
    return [f"\n{in_full(', '.join(alike), why)}" for why, alike in names.items()]
