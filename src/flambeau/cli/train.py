"""`flambeau train`: the flags of train/settings/settings.py in, a trained model in a run folder out."""

import argparse
import dataclasses
import functools
import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flambeau.cli.launch import number_of_procs
from flambeau.errors import InputError
from flambeau.train.settings.config_file import canonical, from_stored, read_config
from flambeau.train.settings.fields import allowed_types
from flambeau.train.settings.settings import FIELDS, ResolvedSettings, Settings

if TYPE_CHECKING:
    from flambeau.data.sources.source import Source
    from flambeau.train.build.data import DataFacts
    from flambeau.train.checkpoints.run_folder import RunFolder
    from flambeau.train.fit import Training

HELP = "train an image classifier; the same command again continues its run"
_EMBEDDED_NAME = "fashion-mnist"
_PACKED_FOLDERS = (".lmdb", ".zarr", ".n5")  # whose suffix is no part of a name: photos.v2 is one


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
    # 'auto' says as little as a flag that is not given: the run holds what it was resolved to.
    explicit = {
        k: v
        for k in ("duration", *given)
        if (v := getattr(settings, k)) is not None and v != "auto"
    }
    folder = default_folder(settings, explicit) if arguments.out is None else Path(arguments.out)
    FLAG.install(run, is_command=True)  # before the seconds that torch takes to load
    try:
        flags = {"fresh": arguments.fresh, "dry_run": arguments.dry_run}
        return _watched_train(settings, explicit, folder, **flags)
    finally:
        FLAG.restore(run)


def _watched_train(
    settings: Settings, explicit: Mapping[str, Any], folder: Path, *, fresh: bool, dry_run: bool
) -> int:
    """Train with the watchdog between the ranks from beginning to end."""
    from flambeau.parallel.ranks import join_ranks
    from flambeau.train.checkpoints.run_folder import START_AGAIN

    ranks = join_ranks()
    ranks.begin_watch(settings.stall_timeout)
    try:
        return _train(settings, explicit, folder, fresh=fresh, dry_run=dry_run)
    except InputError as error:
        if START_AGAIN not in str(error):
            raise
        raise InputError(str(error).replace(START_AGAIN, "--fresh sets it aside")) from error
    finally:
        ranks.end_watch()


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
    return launch([sys.executable, "-m", "flambeau", *kept], procs=procs, say=_say)


def _replay(arguments: argparse.Namespace, given: Mapping[str, Any]) -> int:
    others = [f for f in ("out", "config", "fresh", "dry_run") if getattr(arguments, f)]
    if given or others:
        flag = _flag([*given, *others][0])
        raise InputError(f"--replay-step takes its settings from the run; leave {flag} out")
    from flambeau.train.replay_step import replay_step

    return replay_step(Path(arguments.replay_step), say=_say)


def default_folder(settings: Settings, explicit: Mapping[str, Any]) -> Path:
    """runs/NAME after the data, with a hash of the settings that were given, so that each has its folder."""
    # Of FILE.py:FUNCTION and torchvision:NAME both; Windows and archives allow no colon in a name.
    data = Path(
        (settings.data or _EMBEDDED_NAME)
        .replace(".py:", "-")
        .replace("torchvision:", "torchvision-")
    )
    is_plain = data.is_dir() and data.suffix not in _PACKED_FOLDERS
    name = data.name if is_plain else data.stem
    told = {k: v for k, v in explicit.items() if k != "data" and not FIELDS[k].metadata["neutral"]}
    if told:
        name += "-" + hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:8]
    return Path("runs") / name


def _train(
    settings: Settings, explicit: Mapping[str, Any], folder: Path, *, fresh: bool, dry_run: bool
) -> int:
    from flambeau.parallel.ranks import join_ranks
    from flambeau.train.checkpoints.published_weights import published
    from flambeau.train.checkpoints.run_folder import RunFolder

    place, ranks = RunFolder(folder), join_ranks()
    stored = None if fresh else ranks.first(lambda: _stored(explicit, place))
    ranks.first(lambda: _check_outside(folder, (stored or settings).data))
    resolved, facts, train, val = _open(settings, stored, place)
    if stored is not None and ranks.first(lambda: published(place)) is not None:
        if ranks.is_first:
            _report(place, resolved.data, already=True)
        return 0

    if dry_run:
        from flambeau.train.dry_run import dry_run as train_briefly

        if ranks.is_first:
            _show(resolved, train_images=len(train), val_images=len(val))
        train_briefly(resolved, facts, train, val, say=_say)
        return 0
    from flambeau.train.fit import set_up

    def before_run() -> None:
        if fresh and (aside := place.set_aside()) is not None:
            _say(f"the run that was in {folder} is now in {aside}")
        _show(resolved, train_images=len(train), val_images=len(val))

    training = set_up(resolved, facts, train, val, folder=folder, before_run=before_run)
    training.run.progress.say(f"the run is in {folder}")  # only now: nothing has prevented it
    _fit(training)
    if ranks.is_first:
        _report(place, resolved.data, already=False)
    return 0


def _open(
    settings: Settings, stored: ResolvedSettings | None, place: "RunFolder"
) -> "tuple[ResolvedSettings, DataFacts, Source, Source]":
    """The data of a run, new or stored, its settings with nothing left open, and the facts of the data."""
    from flambeau.parallel.ranks import join_ranks
    from flambeau.train.build.auto_settings import resolve
    from flambeau.train.build.data import DataFacts, check_unchanged, open_data

    ranks, told = join_ranks(), stored or settings
    if told.download:
        ranks.first(lambda: bool(open_data(told)))  # one fetches, all read
    train, val = ranks.each(lambda: open_data(told))
    if stored is not None:
        resolved, facts = stored, ranks.first(lambda: DataFacts.read(place.dataset))
    else:
        resolved, facts = ranks.first(lambda: resolve(settings, train, val))
    moved = None if stored is None else ranks.first(lambda: _moved(place, stored.data))
    ranks.each(lambda: check_unchanged(facts, train, val, model=resolved.model, moved=moved))
    return resolved, facts, train, val


def _moved(place: "RunFolder", data: str | None) -> str | None:
    """Where a run has its data from, and that they are asked for at another place now; None if not."""
    before = (place.read_config() or {}).get("data")
    if before == data:
        return None
    names = [_EMBEDDED_NAME if path is None else path for path in (before, data)]
    return f"the run in {place.path} is of {names[0]}, and {names[1]} is something else"


def _fit(training: "Training") -> None:
    from flambeau.train.fit import fit
    from flambeau.train.loop.nan_guard import CURES, NotFinite

    try:
        fit(training)
    except NotFinite as error:
        text = str(error).replace(
            CURES, "Usual cures: a smaller --lr, --clip-norm 1, --on-nan rollback"
        )
        raise InputError(
            f"{text}; run it again with: flambeau train --replay-step {error.path}"
        ) from error
    finally:
        training.run.close()


def _stored(explicit: Mapping[str, Any], place: "RunFolder") -> ResolvedSettings | None:
    """The settings of the run that exists already: what is not said again is as it was. Else None."""
    stored = place.read_config()
    if stored is None:
        return None
    if "model" not in stored:
        raise InputError(
            f"{place.path} holds a run of a script, not of `flambeau train`\n"
            "Choose another folder with --out, or set this one aside with --fresh"
        )
    # Also what a machine or an older default had chosen.
    place.check_same({k: v for k, v in stored.items() if k in explicit}, explicit)
    return dataclasses.replace(from_stored(stored, place.config), **explicit)


def _check_outside(folder: Path, data: str | None) -> None:
    if data is not None and folder.resolve().is_relative_to(data):
        raise InputError(
            f"the run folder {folder} would lie within the data {data}, as one more class of them; "
            "name another one with --out"
        )


def _show(settings: Settings, *, train_images: int, val_images: int) -> None:
    """Every setting with its value: nothing is hidden."""
    _say(f"{train_images} images to train on, {val_images} to evaluate on")
    by_group: dict[str, list[str]] = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if value is not None and field.name != "data":
            by_group.setdefault(field.metadata["group"], []).append(f"{field.name}={value}")
    for group, texts in by_group.items():
        _say(f"  {group:<13} {' '.join(texts)}")


def _report(place: "RunFolder", data: str | None, *, already: bool) -> None:
    """Where the run ended, and what to do next."""
    from flambeau.train.checkpoints.published_weights import published

    result = published(place)
    assert result is not None
    embedded = Path(__file__).parents[1] / "data" / "embedded" / "fashion_mnist_val.rec"
    which = {"ema": "averaged", "best": "best", "last": "last"}[result.weights]
    figures = ", ".join(
        f"{k} {'nan' if v is None else format(v, '.4f')}" for k, v in result.metrics.items()
    )
    if already:
        place.tidy()
        print(f"this run is finished ({figures}); --fresh starts it again")
    else:
        print(f"finished: {figures} ({which} weights, step {result.step})")
    print(f"run folder: {place.path}    weights: {place.weights}")
    print(f"next: flambeau predict {place.path} IMAGE...")
    print(f"      flambeau evaluate {place.path} {embedded if data is None else 'DATA'}")
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


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
