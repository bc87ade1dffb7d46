"""`flambeau tune`: the settings with which a training runs fastest on this machine, or in least memory."""

import argparse
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flambeau.cli.command import check
from flambeau.cli.doctor import add_sandbox_flag, command_of, script_of
from flambeau.cli.table import print_json, print_table
from flambeau.cli.written_file import check_file
from flambeau.errors import InputError
from flambeau.provenance import ask_for_config
from flambeau.run.options.durations import parse_seconds
from flambeau.terminal import print_text, say

if TYPE_CHECKING:
    from flambeau.tune.doctor.paired_test import Gain
    from flambeau.tune.search.levers import Lever, TrialFacts
    from flambeau.tune.search.run_tune import Options
    from flambeau.tune.search.search import SearchResult

HELP = "find the settings with which a training runs fastest here"
TAKES_REST = True
"""What is no flag of this command belongs to the script, or to train."""


_EXAMPLES = """\
flambeau tune photos/ --model resnet18 --budget 5min   (the arguments of flambeau train)
flambeau tune --objective memory photos/ --model vit_small_patch16_224
flambeau tune -- python train.py                       (what can be set from outside)

Each trial is a line of tuned.jsonl; the same command again goes on where it was interrupted.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "flambeau tune [FLAGS] ([arguments of flambeau train] | -- COMMAND ...)"
    parser.epilog = _EXAMPLES
    add = parser.add_argument
    add(
        "--objective",
        choices=("throughput", "memory"),
        default="throughput",
        help="what is to be good: steps per second, or memory (default: throughput)",
    )
    add(
        "--budget",
        default="5min",
        metavar="TIME",
        help="no new comparison after this time, such as 90s (default: 5min)",
    )
    add("--rounds", type=int, default=3, metavar="N", help="pairs of trials per value (default: 3)")
    add(
        "--planned",
        default="60min",
        metavar="TIME",
        help="what the training takes as it is; a longer start must save more (default: 60min)",
    )
    add("--limit", default="2min", metavar="TIME", help="what one trial may take (default: 2min)")
    add_sandbox_flag(parser)
    add(
        "--write",
        default="tuned.toml",
        metavar="FILE",
        help="where the settings go, for flambeau train --config (default: tuned.toml)",
    )
    add("--json", action="store_true", help="print one JSON object instead, for programs")


def run(arguments: argparse.Namespace) -> int:
    options = _options(arguments)
    file = Path(arguments.write)
    check_file(
        "--write", file, endings=(".toml",), what="settings are a TOML file", example="tuned.toml"
    )
    from flambeau.tune.search.run_tune import check_replaceable, write_tuned_toml

    check_replaceable(file)
    command = command_of(arguments.rest, verb="tune")
    is_train = command[1:4] == ["-m", "flambeau", "train"]
    given = command[4:] if is_train else []
    from_file = _settings_of_file(given)
    from flambeau.tune.search.run_tune import tune

    device = _value_of("--device", given) or from_file.get("device", "auto")
    if is_train:
        command = _with_data(command, from_file.get("data"))
    data_at = _folder_at(command) if is_train else None
    folder = None if data_at is None else command[data_at]
    levers_of = _levers(given if is_train else None, options.objective, device, folder)
    limit_s = parse_seconds(arguments.limit, name="--limit")
    with script_of(command, arguments, limit_s=limit_s, verb="tune") as script:
        result = tune(
            script,
            levers_of,
            options,
            is_train=is_train,
            journal=file.with_suffix(".jsonl"),
            say=lambda text: say(f"tune: {text}"),
            data_at=data_at,
        )
    if is_train:
        write_tuned_toml(file, result, from_file)
    if arguments.json:
        print_json([_as_json(result)])
    else:
        _print(result, file if is_train else None)
    return 0


def _options(arguments: argparse.Namespace) -> "Options":
    from flambeau.tune.search.run_tune import Options

    if not 2 <= arguments.rounds <= 10:
        raise InputError(f"--rounds must be from 2 to 10, got {arguments.rounds}")
    budget_s, planned_s = (
        parse_seconds(getattr(arguments, name), name=f"--{name}") for name in ("budget", "planned")
    )
    return Options(
        objective=arguments.objective,
        budget_s=budget_s,
        rounds=arguments.rounds,
        planned_s=planned_s,
    )


def _value_of(flag: str, words: Sequence[str]) -> str | None:
    """The value of a flag; as in argparse the last one counts."""
    value = None
    for word, after in itertools.zip_longest(words, words[1:]):
        if word == flag:
            value = after
        elif word.startswith(f"{flag}="):
            value = word.partition("=")[2]
    return value


def _settings_of_file(given: Sequence[str]) -> dict[str, Any]:
    from flambeau.trainer.settings.stored_settings import read_config

    file = _value_of("--config", given)
    if file is None:
        return {}
    values = read_config(Path(file))
    named = vars(check(["train", *given]))
    ask_for_config(Path(file), values, named, trust="--trust" in given, say=say)
    return values


def _data_of(given: Sequence[str]) -> str | None:
    return getattr(check(["train", *given]), "data", None)


def _with_data(command: list[str], from_file: str | None) -> list[str]:
    """A command of `flambeau train` with DATA from the settings file, if it names none itself."""
    if from_file is None or _data_of(command[4:]) is not None:
        return command
    return [*command[:4], from_file, *command[4:]]


def _folder_at(command: Sequence[str]) -> int | None:
    """Index of the folder of images in a command of `flambeau train`; None if DATA is no folder."""
    given = command[4:]
    data = _data_of(given)
    if data is None or not Path(data).is_dir():
        return None

    def is_data(index: int) -> bool:  # not the value of a flag
        return _data_of([*given[:index], "another", *given[index + 1 :]]) == "another"

    return 4 + next(n for n, word in enumerate(given) if word == data and is_data(n))


def _levers(
    given: Sequence[str] | None, objective: str, device: str, folder: str | None
) -> "Callable[[TrialFacts], list[Lever]]":
    """Gives the levers from the facts of the first trial; `given` is None for a script."""
    import torch

    from flambeau.recipes.setup.environment import default_device
    from flambeau.tune.search.levers import (
        LoaderFacts,
        TrainFacts,
        levers_of_script,
        levers_of_train,
    )

    on = default_device() if device == "auto" else torch.device(device)
    if given is None:
        return lambda facts: levers_of_script(on, facts if isinstance(facts, LoaderFacts) else None)
    return lambda facts: levers_of_train(
        given,
        objective=objective,
        device=on,
        folder=folder,
        run=facts if isinstance(facts, TrainFacts) else None,
    )


def _as_json(result: "SearchResult") -> dict[str, object]:
    return {
        "choice": result.choice,
        "environment": dict(
            pair for setting in result.settings for pair in setting.environment.items()
        ),
        "together": None if result.together is None else result.together.times,
        "verdict": None if result.together is None else result.together.verdict,
        "tried": [
            {
                "lever": one.lever,
                "value": one.value,
                "chosen": one.is_chosen,
                "note": one.note,
                "times": _times(one.gain),
                "low": _low(one.gain),
                "alone": _times(one.alone),
                "alone_low": _low(one.alone),
            }
            for one in result.steps
        ],
    }


def _times(gain: "Gain | None") -> float | None:
    return None if gain is None else gain.times


def _low(gain: "Gain | None") -> float | None:
    return None if gain is None or math.isnan(gain.low) else gain.low


def _print(result: "SearchResult", file: Path | None) -> None:
    from flambeau.tune.doctor.formatting import reasons_in_full
    from flambeau.tune.search.run_tune import variables_of

    def shown(gain: "Gain | None") -> str:
        return "-" if gain is None else f"{gain.times:.2f}x"

    rows = []
    for one in result.steps:
        verdict = one.note.partition("\n")[0] or ("" if one.gain is None else one.gain.verdict)
        last = "chosen" if one.is_chosen else verdict
        rows.append((one.lever, one.value, shown(one.alone), shown(one.gain), last))
    print_table(
        ("lever", "value", "alone", "on top", ""),
        rows,
        right=("alone", "on top"),
        styles={"chosen": "green"},
    )
    for reason in reasons_in_full((f"{one.lever}={one.value}", one.note) for one in result.steps):
        print_text(f"\n{reason}")
    if not result.choice:
        print_text("\nNothing was surely better than the settings as they are.")
        return
    print_text("\non top: with what was chosen above.")
    if result.together is not None:
        print_text(
            f"All that was chosen together: {result.together.times:.2f}x, {result.together.verdict}."
        )
    variables = variables_of(result)
    if file is not None:
        command = f"{variables} flambeau train --config {file} ...".strip()
        print_text(f"Wrote {file}: {command}")
    elif variables:
        print_text(f"Start it with {variables} before the command.")
