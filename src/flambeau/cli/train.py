"""`flambeau train`: the flags of train/settings/settings.py in, a trained model in a run folder out."""

import argparse
import dataclasses
import functools
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flambeau.cli.launch import number_of_procs
from flambeau.errors import InputError
from flambeau.terminal import say
from flambeau.train.settings.config_file import canonical, read_config
from flambeau.train.settings.default_folder import default_folder, told_settings
from flambeau.train.settings.fields import allowed_types
from flambeau.train.settings.settings import FIELDS, Settings

HELP = "train an image classifier; the same command again continues its run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One flag per setting, and those that choose the folder."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for name, field in FIELDS.items():
        title = field.metadata["group"]
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        _add_setting(parser if name == "data" else groups[title], name, field)
    folder = groups["run folder"]
    folder.add_argument(
        "--out",
        metavar="DIR",
        help="the run folder (default: runs/NAME, and a hash if flags are given)",
    )
    folder.add_argument(
        "--config", metavar="FILE", help="settings from a TOML file; flags win over it"
    )
    folder.add_argument(
        "--fresh", action="store_true", help="start again; an existing run is renamed, not deleted"
    )
    folder.add_argument(
        "--dry-run",
        action="store_true",
        help="train for a few steps, say what they cost and how long the run would take, and leave nothing",
    )
    folder.add_argument(
        "--replay-step",
        metavar="FILE",
        help="run the step again that stopped a run; nothing is written",
    )
    groups["processes"].add_argument(
        "--procs",
        metavar="N|auto",
        help="train on N processes of this machine; auto starts one for each GPU (default: 1)",
    )
    # What launchers before torchrun pass to each process, in the two spellings that they had.
    parser.add_argument(
        "--local-rank", "--local_rank", type=int, default=None, help=argparse.SUPPRESS
    )


def _add_setting(
    parser: argparse._ActionsContainer, name: str, field: dataclasses.Field[Any]
) -> None:
    """The flag of a setting; it appears in the namespace only if it is given."""
    text, choices = field.metadata["help"] + _default_text(field), field.metadata["choices"]
    (kind,) = allowed_types(field)
    if name == "data":
        parser.add_argument("data", nargs="?", default=argparse.SUPPRESS, metavar="DATA", help=text)
    elif kind is bool:
        parser.add_argument(
            _flag(name), action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text
        )
    else:
        metavar = "{" + ",".join(choices) + "}" if choices else _metavar(name, kind)
        read = functools.partial(_read, name, kind)
        parser.add_argument(
            _flag(name), type=read, default=argparse.SUPPRESS, metavar=metavar, help=text
        )


def _read(name: str, kind: type, text: str) -> Any:
    """The value of a flag."""
    try:
        return kind(text)
    except ValueError:
        what = {int: "a whole number", float: "a number"}[kind]
        hint = "; part of one is --duration, such as 1.5ep" if name == "epochs" else ""
        raise argparse.ArgumentTypeError(f"must be {what}, got {text!r}{hint}") from None


def run(arguments: argparse.Namespace) -> int:
    """Train, continue, or replay one step."""
    from flambeau.parallel.preemption import FLAG

    if arguments.local_rank is not None:
        os.environ.setdefault("LOCAL_RANK", str(arguments.local_rank))
    # cuBLAS reads it when CUDA starts, which looking for a device does: see recipes/setup/determinism.py.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if "RANK" in os.environ:
        # Torch's sockets comment on lost peers and unknown host names; what matters the watch says.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    given = {name: getattr(arguments, name) for name in FIELDS if hasattr(arguments, name)}
    if arguments.replay_step is not None:
        return _replay(arguments, given)
    if arguments.out == "":
        raise InputError("--out is empty; name a folder")
    if arguments.config is not None:
        from_file = read_config(Path(arguments.config))
        # A flag for the length replaces the file's, in whichever of the two spellings.
        if {"epochs", "duration"} & given.keys():
            from_file = {k: v for k, v in from_file.items() if k not in ("epochs", "duration")}
        given = from_file | given
    settings = canonical(Settings(**given))
    if arguments.procs is not None and (procs := _procs(arguments.procs)) > 1:
        return _launch(arguments.words, procs)
    told = told_settings(settings, given)
    folder = default_folder(settings, told) if arguments.out is None else Path(arguments.out)
    FLAG.install(run, is_command=True)  # before the seconds that torch takes to load
    try:
        from flambeau.train.start import start

        was_finished = start(
            settings, told, folder, say=say, fresh=arguments.fresh, dry_run=arguments.dry_run
        )
        if was_finished or not arguments.dry_run:
            _report(folder, already=was_finished)
        return 0
    finally:
        FLAG.restore(run)


def _procs(text: str) -> int:
    """The number of processes that --procs asks for."""
    if "RANK" in os.environ:
        raise InputError(
            "--procs starts processes itself; leave it out under torchrun or `flambeau launch`"
        )
    return number_of_procs(text)


def _launch(words: Sequence[str], procs: int) -> int:
    """Run this command, without --procs, on several processes of this machine."""
    from flambeau.parallel.launcher.launch import launch

    kept, skip = [], False
    for word in words:
        if not skip and word != "--procs" and not word.startswith("--procs="):
            kept.append(word)
        skip = word == "--procs"
    return launch([sys.executable, "-m", "flambeau", *kept], procs=procs, say=say)


def _replay(arguments: argparse.Namespace, given: Mapping[str, Any]) -> int:
    others = [f for f in ("out", "config", "fresh", "dry_run") if getattr(arguments, f)]
    if given or others:
        flag = _flag([*given, *others][0])
        raise InputError(f"--replay-step takes its settings from the run; leave {flag} out")
    from flambeau.train.replay_step import replay_step

    return replay_step(Path(arguments.replay_step), say=say)


def _report(folder: Path, *, already: bool) -> None:
    """Where the run ended, and what to do next; said by the first process."""
    from flambeau.parallel.ranks import join_ranks
    from flambeau.train.checkpoints.published_weights import published
    from flambeau.train.checkpoints.run_folder import RunFolder

    if not join_ranks().is_first:
        return
    place = RunFolder(folder)
    result = published(place)
    assert result is not None
    embedded = Path(__file__).parents[1] / "data" / "embedded" / "fashion_mnist_val.rec"
    which = {"ema": "averaged", "best": "best", "last": "last"}[result.weights]
    figures = ", ".join(
        f"{k} {'nan' if v is None else format(v, '.4f')}" for k, v in result.metrics.items()
    )
    figures = figures or "nothing was evaluated"
    if already:
        place.tidy()
        print(f"this run is finished ({figures}); --fresh starts it again")
    else:
        print(f"finished: {figures} ({which} weights, step {result.step})")
    print(f"run folder: {place.path}    weights: {place.weights}")
    print(f"next: flambeau predict {place.path} IMAGE...")
    data = "DATA" if "data" in (place.read_config() or {}) else embedded
    print(f"      flambeau evaluate {place.path} {data}")
    print(f"      flambeau verify {place.path}")


def _flag(name: str) -> str:
    return "DATA" if name == "data" else "--" + name.replace("_", "-")


def _default_text(field: dataclasses.Field[Any]) -> str:
    if field.metadata["auto"]:
        return f" (default: {field.metadata['auto']})"
    if field.default is True:
        return " (default: yes)"
    if field.default is None or field.default is False:
        return ""
    return f" (default: {str(field.default).replace('%', '%%')})"


def _metavar(name: str, kind: type) -> str:
    if name in ("duration", "warmup", "checkpoint_every"):
        return "LENGTH"
    return {int: "N", float: "X", str: "NAME"}[kind]
