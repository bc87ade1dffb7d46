"""`flambeau doctor`: what a training waits for and needs, and what would make it faster, measured."""

import argparse
import contextlib
import functools
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flambeau.cli.reading_flags import add_trust
from flambeau.cli.table import print_json, print_table
from flambeau.cli.written_file import check_file, check_page
from flambeau.data.stores.address import is_address
from flambeau.errors import InputError
from flambeau.run.options.durations import parse_seconds
from flambeau.sandbox.keep_off_files import outside
from flambeau.terminal import print_text, say
from flambeau.user_code import is_function

if TYPE_CHECKING:
    from flambeau.sandbox.changed_files import ChangedFiles
    from flambeau.tune.doctor.answer import Answer
    from flambeau.tune.doctor.trial import Script
    from flambeau.tune.step.training_steps import Steps

HELP = "find where the time of a training goes, and measure what would make it faster"
TAKES_REST = True
"""What is no flag of this command belongs to the script, or to train."""

_EXAMPLES = """\
flambeau doctor -- python train.py --lr 0.1       a script, which is watched and tried in several ways
flambeau doctor -- torchrun --nproc-per-node 2 train.py
flambeau doctor photos/ --model resnet18          the arguments of flambeau train, likewise
flambeau doctor --learning -- python train.py     why it does not learn
flambeau doctor runs/photos                       a step of a run, on its own data
flambeau doctor resnet18 --input 32,3,224,224     a step of a model, on random numbers; or net.py:make

The script runs for some seconds, several times, and is ended. What it writes is thrown away.
"""
_SCRIPT_DEFAULTS: dict[str, Any] = {
    "seconds": 8.0,
    "steps": 20,
    "limit": "5min",
    "trials_may_write": False,
}
_STEP_DEFAULTS: dict[str, Any] = {"input": (), "memory": None, "trust": False}
_BATCH = 8  # images of a step of a model; chosen


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "flambeau doctor [FLAGS] (-- COMMAND ... | [arguments of flambeau train] | RUN | MODEL)"
    )
    parser.epilog = _EXAMPLES
    add = parser.add_argument
    add(
        "--learning",
        action="store_true",
        help="find why a script does not learn, in place of what it waits for",
    )
    add("--no-trials", action="store_true", help="watch only, and try nothing")
    add(
        "--rounds",
        type=int,
        help="pairs of runs for each change that is tried (default: 3); of RUN or MODEL rounds of steps (15)",
    )
    add(
        "--budget",
        metavar="TIME",
        help="no new trial after this time, such as 90s (default: 5min; 1min of RUN or MODEL)",
    )
    add("--trace", metavar="FILE", help="write a time line of three steps, for ui.perfetto.dev")
    add("--html", metavar="FILE", help="write all of it as a page, too")
    add("--json", action="store_true", help="print one JSON object instead, for programs")
    script = parser.add_argument_group("of a script")
    add = script.add_argument
    add("--seconds", type=float, help="how long steps are watched (default: 8)")
    add("--steps", type=int, help="how many steps at least, if they are quick enough (default: 20)")
    add(
        "--limit",
        metavar="TIME",
        help="what one run may take until its steps are counted (default: 5min)",
    )
    add_sandbox_flag(script)
    step = parser.add_argument_group("of RUN or MODEL")
    add = step.add_argument
    add(
        "--input",
        action="append",
        metavar="SIZES",
        help="of MODEL: sizes of an input, as inspect takes them (default: 8 images)",
    )
    add(
        "--memory",
        metavar="FILE.pickle",
        help="record each block of a CUDA device's memory, for https://pytorch.org/memory_viz",
    )
    add_trust(step)


def trial_outputs(arguments: argparse.Namespace) -> list[Path] | None:
    """Files that are written besides those of the user's code; None if a sandbox holds a script."""
    if not any(is_function(word) or _is_run(word) for word in _target(arguments)):
        return None
    files = (arguments.html, arguments.trace, arguments.memory)
    return [Path(file) for file in files if file is not None]


def run(arguments: argparse.Namespace) -> int:
    target = _target(arguments)
    is_script = not target or _is_data(target[0])
    _check(arguments, is_script=is_script)
    answer = _of_script(arguments) if is_script else _of_steps(target[0], arguments)
    if arguments.json:
        print_json([answer.data])
    else:
        _print(answer)
    if arguments.html is not None:
        from flambeau.run.folder.report_file import write_page
        from flambeau.tune.doctor.answer import page_of

        page = page_of(answer, shlex.join(arguments.rest).removeprefix("-- "))
        write_page(outside(Path(arguments.html)), page)
        say(f"doctor: wrote {arguments.html}")
    return 0


# ---------------------------------------------------------------- a script, or a step


def _target(arguments: argparse.Namespace) -> list[str]:
    """The only word, if it may be a run or a model; else nothing: the words are of a script or of train."""
    words = arguments.rest
    if len(words) != 1 or words[0].startswith("-") or words[0] == "train":
        return []
    (word,) = words
    is_elsewhere = Path(word).exists() or os.sep in word or is_address(word)
    may_be = is_function(word) or _is_run(word) or not is_elsewhere
    return [word] if may_be else []


def _is_run(word: str) -> bool:
    return _is_run_there(word) if is_address(word) else (Path(word) / "config.toml").is_file()


@functools.cache
def _is_run_there(address: str) -> bool:
    from flambeau.run.folder.store_run import is_run_in_store

    return is_run_in_store(address)


def _is_data(word: str) -> bool:
    """Whether it is hf:NAME or torchvision:NAME of a data set, which no model is called."""
    kind, _, name = word.partition(":")
    if kind != "torchvision":
        return kind == "hf"
    from torchvision.models import list_models

    return name not in list_models()


def _check(arguments: argparse.Namespace, *, is_script: bool) -> None:
    """Refuse what would have no effect, and set the defaults of the rest."""
    defaults, others = _SCRIPT_DEFAULTS, _STEP_DEFAULTS
    if arguments.learning:
        if not is_script:
            raise InputError("--learning is only for a script: leave it out")
        for name in ("no_trials", "rounds", "budget", "trace"):
            if getattr(arguments, name):
                flag = f"--{name.replace('_', '-')}"
                raise InputError(f"{flag} is about time, not about learning: leave it out")
        defaults = {**defaults, "steps": 40}
    if not is_script:
        defaults, others = others, defaults
    for name in others:
        # --trust is also a flag of flambeau train: see _of_script
        if getattr(arguments, name) and not (name == "trust" and "--" not in arguments.rest):
            what = "RUN or MODEL" if is_script else "a script"
            raise InputError(f"--{name.replace('_', '-')} is only for {what}: leave it out")
    for name, value in defaults.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    if arguments.rounds is None:
        arguments.rounds = 3 if is_script else 15
    arguments.budget = arguments.budget or ("5min" if is_script else "1min")
    parse_seconds(arguments.budget, name="--budget")
    for name, low in (("steps", 2), ("rounds", 1)):
        value = getattr(arguments, name)
        if value is not None and not low <= value <= 100_000:
            raise InputError(f"--{name} must be from {low} to 100000, got {value}")
    _check_files(arguments)


def _check_files(arguments: argparse.Namespace) -> None:
    """Refuse unusable output files before minutes of work."""
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
    if arguments.memory is not None:
        check_file(
            "--memory",
            Path(arguments.memory),
            endings=(".pickle",),
            what="a record of memory is a pickle",
            example="memory.pickle",
        )


def _of_script(arguments: argparse.Namespace) -> "Answer":
    if not 0.5 <= arguments.seconds <= 3600:
        raise InputError(f"--seconds must be from 0.5 to 3600, got {arguments.seconds:g}")
    words = [*arguments.rest, *(["--trust"] if arguments.trust else [])]
    command = command_of(words, verb="doctor")
    limit_s = parse_seconds(arguments.limit, name="--limit")
    with script_of(command, arguments, limit_s=limit_s, verb="doctor") as script:
        if arguments.learning:
            from flambeau.tune.learning.run_learning import watch

            return watch(script, steps=arguments.steps, seconds=arguments.seconds, say=_say)
        from flambeau.tune.doctor.run_doctor import Options, answer_of, diagnose

        options = Options(
            seconds=arguments.seconds,
            steps=arguments.steps,
            budget_s=parse_seconds(arguments.budget, name="--budget"),
            rounds=0 if arguments.no_trials else arguments.rounds,
            trace=None if arguments.trace is None else f"{Path(arguments.trace).absolute()}",
        )
        return answer_of(diagnose(script, options, say=_say))


def _say(text: str) -> None:
    say(f"doctor: {text}")


def _of_steps(target: str, arguments: argparse.Namespace) -> "Answer":
    # Torch's profiler and allocator read these when they are loaded, and print less on standard error.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if arguments.input and _is_run(target):
        raise InputError("--input is only for MODEL: a run reads its own data; leave it out")
    from flambeau.tune.step.step_answer import StepOptions, answer_of_steps

    def file(name: str | None) -> Path | None:
        return None if name is None else outside(Path(name))

    options = StepOptions(
        rounds=0 if arguments.no_trials else arguments.rounds,
        budget_s=parse_seconds(arguments.budget, name="--budget"),
        trace=file(arguments.trace),
        memory=file(arguments.memory),
    )
    with (
        contextlib.redirect_stdout(sys.stderr),  # what the model itself prints
        _steps(target, arguments) as steps,
    ):
        return answer_of_steps(steps, options, say=lambda text: say(f"doctor: {text}"))


@contextlib.contextmanager
def _steps(target: str, arguments: argparse.Namespace) -> "Iterator[Steps]":
    from flambeau.inspection.named_model import named_model
    from flambeau.run.folder.store_run import run_here
    from flambeau.trainer.parts.device import pick_device, use_threads
    from flambeau.trainer.parts.model import OWN_MODELS
    from flambeau.tune.step.training_steps import steps_of_model, steps_of_run

    if _is_run(target):
        with steps_of_run(run_here(target, say), trust=arguments.trust, say=say) as steps:
            yield steps
        return
    try:
        model, args, kwargs = named_model(
            target, arguments.input, batch=_BATCH, values=True, trust=arguments.trust, say=say
        )
    except InputError as error:
        import timm

        if ":" in target or target in OWN_MODELS or timm.is_model(target):
            raise
        raise InputError(
            f"there is no file, no run folder and no model {target}: {error}\n"
            "flambeau doctor takes a script (flambeau doctor -- python train.py), a run folder, or a model "
            "(resnet18, torchvision:NAME, FILE.py:FUNCTION)"
        ) from error
    use_threads()
    yield steps_of_model(model, args, kwargs, device=pick_device("auto"))


def _print(answer: "Answer") -> None:
    print_text(f"{answer.about}\n\n{answer.verdict}")
    was_line = False
    for part in answer.parts:
        if isinstance(part, str):
            print_text(part if was_line else f"\n{part}")
        else:
            print_text()
            print_table(part.heads, part.rows, right=part.heads[len(part.heads) - part.numbers :])
        was_line = isinstance(part, str)


def add_sandbox_flag(parser: argparse._ActionsContainer) -> None:
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


def _say_changes(changed: "ChangedFiles", sandbox_folders: Sequence[Path], verb: str) -> None:
    changes = changed.changes(except_in=sandbox_folders)
    where = ", ".join(map(str, changed.folders))
    some = "" if changed.is_complete else " (too many files to look at all of them)"
    say(f"{verb}: {len(changes)} files in {where} were changed by the trials or meanwhile{some}")
    here = Path.cwd()
    for what, path in sorted(changes, key=lambda one: not one[1].is_relative_to(here)):
        say(f"  {what}: {path}")


def command_of(words: Sequence[str], *, verb: str) -> list[str]:
    """The command to run, from `-- COMMAND ...` or the arguments of `flambeau train`, else InputError."""
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
        if words[0] == "flambeau" and words[1:2] != ["train"]:
            named = " ".join(words[:2])
            example = "flambeau train ..., or python train.py ..."
            raise InputError(f"{named}: {verb} needs a training: {example}")
        words = words[1 + (words[0] == "flambeau") :]
    elif words and words[0].endswith(".py") and Path(words[0]).is_file():
        raise InputError(
            f"{words[0]} is a Python file, and no images: flambeau {verb} -- python {shlex.join(words)}"
        )
    from flambeau.cli.command import check

    check(["train", *words])
    for flag in ("--dry-run", "--find-lr", "--replay-step"):
        if any(word == flag or word.startswith(f"{flag}=") for word in words):
            raise InputError(f"leave {flag} out: {verb} needs a training, whose run it removes")
    return [sys.executable, "-m", "flambeau", "train", *words]
