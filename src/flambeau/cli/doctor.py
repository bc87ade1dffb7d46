"""`flambeau doctor`: what a training script waits for, and what would make it faster, measured."""

import argparse
import contextlib
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flambeau.cli.table import print_json, print_table
from flambeau.cli.written_file import check_file, check_page
from flambeau.errors import InputError
from flambeau.run.options.durations import parse_seconds
from flambeau.terminal import say

if TYPE_CHECKING:
    from flambeau.sandbox.changed_files import ChangedFiles
    from flambeau.tune.doctor.run_doctor import Diagnosis, Options
    from flambeau.tune.doctor.trial import Script

HELP = "find what a training script waits for, and measure what would make it faster"
TAKES_REST = True
"""What is no flag of this command belongs to the script, or to train."""

_EXAMPLES = """\
flambeau doctor -- python train.py --lr 0.1
flambeau doctor -- torchrun --nproc-per-node 2 train.py
flambeau doctor photos/ --model resnet18          (the arguments of flambeau train)
flambeau doctor --no-trials --trace steps.json.gz -- python train.py

The script runs for some seconds, several times, and is ended. What it writes is thrown away.
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
    add_sandbox_flag(parser)
    add("--trace", metavar="FILE", help="write a time line of three steps, for ui.perfetto.dev")
    add("--html", metavar="FILE", help="write all of it as a page, too")
    add("--json", action="store_true", help="print one JSON object instead, for programs")


def run(arguments: argparse.Namespace) -> int:
    """Watch, try, and print."""
    options = _options(arguments)
    limit_s = parse_seconds(arguments.limit, name="--limit")
    from flambeau.tune.doctor.run_doctor import diagnose

    command = command_of(arguments.rest, verb="doctor")
    with script_of(command, arguments, limit_s=limit_s, verb="doctor") as script:
        found = diagnose(script, options, say=lambda text: say(f"doctor: {text}"))
    if arguments.json:
        print_json([found.as_json()])
    else:
        _print(found)
    if arguments.html is not None:
        from flambeau.run.folder.report_file import write_page
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
    if arguments.html is not None:
        check_page(
            "--html", Path(arguments.html), example="doctor.html", instead="name another file"
        )
    if arguments.trace is not None:
        check_file(
            "--trace",
            Path(arguments.trace),
            endings=(".json", ".json.gz"),
            what="a time line is a JSON file",
            example="steps.json.gz",
        )
    budget_s = parse_seconds(arguments.budget, name="--budget")
    from flambeau.tune.doctor.run_doctor import Options

    trace = None if arguments.trace is None else f"{Path(arguments.trace).absolute()}"
    return Options(
        seconds=arguments.seconds,
        steps=arguments.steps,
        budget_s=budget_s,
        rounds=0 if arguments.no_trials else arguments.rounds,
        trace=trace,
    )


def add_sandbox_flag(parser: argparse.ArgumentParser) -> None:
    """Of commands that run a script in trials."""
    parser.add_argument(
        "--trials-may-write",
        action="store_true",
        help="run trials among your files where nothing here can keep them off; lists what was changed",
    )


@contextlib.contextmanager
def script_of(
    command: Sequence[str], arguments: argparse.Namespace, *, limit_s: float, verb: str
) -> "Iterator[Script]":
    """A command in its sandbox: says what trials can do to the user's files, and at the end what they did.

    Args:
        command: of the user.
        arguments: with the flag of `add_sandbox_flag`.
        limit_s: of one trial.
        verb: doctor or tune, for messages.

    Raises:
        InputError: nothing here keeps the command from the user's files, and the flag is not given.
    """
    from flambeau.sandbox.changed_files import ChangedFiles
    from flambeau.sandbox.sandbox import UNPROTECTED, Sandbox
    from flambeau.tune.doctor.trial import Script, signals_raise

    way = UNPROTECTED if arguments.trials_may_write else None
    with signals_raise(), Sandbox(way, words=command) as sandbox:
        say(f"{verb}: {sandbox.notice}")
        folders = [Path.cwd(), Path("~").expanduser(), Path(tempfile.gettempdir())]
        changed = ChangedFiles(folders) if sandbox.way == UNPROTECTED else None
        try:
            yield (script := Script(command, sandbox, limit_s))
            if script.peers:
                peers = ", ".join(sorted(script.peers))
                say(f"{verb}: the script was connected to {peers}: what it wrote there is written")
        finally:
            if changed is not None:
                _say_changes(changed, sandbox.folders, verb)


def _say_changes(changed: "ChangedFiles", own: Sequence[Path], verb: str) -> None:
    found = changed.changes(except_in=own)
    where = ", ".join(map(str, changed.folders))
    some = "" if changed.is_complete else " (too many files to look at all of them)"
    say(f"{verb}: {len(found)} files in {where} were changed by the trials or meanwhile{some}")
    here = Path.cwd()
    for what, path in sorted(found, key=lambda one: not one[1].is_relative_to(here)):
        say(f"  {what}: {path}")


def command_of(words: Sequence[str], *, verb: str) -> list[str]:
    """What is run, by the words behind the command's own flags.

    Args:
        words: `-- COMMAND ...`, or arguments of `flambeau train`.
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
    for flag in ("--dry-run", "--find-lr", "--replay-step"):
        if any(word == flag or word.startswith(f"{flag}=") for word in words):
            raise InputError(f"leave {flag} out: {verb} needs a training, whose run it removes")
    return [sys.executable, "-m", "flambeau", "train", *words]


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
            measured = "-"
            verdict = one.failure.partition("\n")[0]
        else:
            measured = f"{one.gain.times:.2f}x"
            verdict = one.gain.verdict
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
