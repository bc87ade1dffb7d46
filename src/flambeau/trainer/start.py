"""A training from its settings to its end: what its folder holds already, its data, its loop.

What the command `flambeau train` and `flambeau.trainer.api.train` have in common.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from flambeau.data.sources.data_names import check_download
from flambeau.errors import InputError
from flambeau.parallel.ranks import Ranks, join_ranks
from flambeau.provenance import named_code
from flambeau.recipes.memory.batch_size_finder import is_out_of_memory
from flambeau.recipes.training.lr_range import LRCurve
from flambeau.run.folder.identity import Identity
from flambeau.run.folder.micro_batches_file import MicroBatches
from flambeau.run.folder.published_weights import finished
from flambeau.run.folder.run_folder import RunFolder
from flambeau.run.loop.nan_guard import NotFinite
from flambeau.run.options.durations import parse_duration
from flambeau.run.options.option import values_of
from flambeau.run.options.track import LineFunction
from flambeau.terminal import columns, text_width
from flambeau.trainer.dry_run import dry_run as train_briefly
from flambeau.trainer.find_lr import find_lr as try_rates
from flambeau.trainer.fit import Training, fit, set_up
from flambeau.trainer.parts.auto_settings import resolve
from flambeau.trainer.parts.class_weights import class_lines
from flambeau.trainer.parts.data import (
    DataFacts,
    Prepared,
    ask_for_teacher,
    check_unchanged,
    open_data,
)
from flambeau.trainer.settings.default_folder import EMBEDDED_NAME
from flambeau.trainer.settings.resolved_settings import ResolvedSettings
from flambeau.trainer.settings.settings import BY_FLAGS, FIELDS, Settings, parse_batch_size
from flambeau.trainer.settings.stored_settings import from_stored


@dataclasses.dataclass(frozen=True)
class Shown:
    """To whom a training tells what happens, besides the lines for the user.

    Attributes:
        bar: show a progress bar on a terminal.
        listener: takes what happens, as a program wants it, on the first process.
        track: functions that get the lines of metrics.jsonl, besides the trackers of the settings.
    """

    bar: bool = True
    listener: Callable[[Mapping[str, Any]], None] | None = None
    track: Sequence[LineFunction] = ()


def start(
    settings: Settings,
    given: Mapping[str, Any],
    folder: Path,
    *,
    say: Callable[[str], None],
    fresh: bool = False,
    dry_run: bool = False,
    find_lr: Callable[[LRCurve], None] | None = None,
    trust: bool = False,
    shown: Shown = Shown(),
) -> bool:
    """Train, or continue, with the watchdog between the processes from beginning to end.

    Args:
        settings: canonical.
        given: those of them that the user gave.
        say: takes lines for the user, on the first process.
        fresh: set a run aside that is in the folder.
        dry_run: train for some steps and leave nothing.
        find_lr: takes the curve of a learning-rate range test, which is made in place of the training.
        trust: run code that the folder of the run or of its teacher names, and `given` does not, also
            where nothing shows that this user has made that folder.
        shown: to whom.

    Returns:
        Whether the run was finished before.

    Raises:
        InputError: whatever the user can fix.
    """
    batch, given, ranks = parse_batch_size(settings.batch_size), _with_number(given), join_ranks()
    ranks.begin_watch(settings.stall_timeout)
    with _ended_watch(ranks), _out_of_memory_refused():
        place = RunFolder(folder, advice=BY_FLAGS)
        stored = None if fresh else ranks.first(lambda: _stored(given, place))
        ranks.first(lambda: _check_outside(folder, (stored or settings).data))
        resumed = None if stored is None else given
        ranks.first(lambda: _check_code(stored or settings, resumed, place, trust=trust, say=say))
        prepared = _open(settings, stored, place, ranks)
        if stored is not None and ranks.first(lambda: _is_finished(stored, place, say)):
            return True
        noted = None if stored is None else ranks.first(lambda: MicroBatches.read(folder).training)
        micro_batch: int | Literal["auto"] | None = noted or ("auto" if batch.finds else None)
        if dry_run or find_lr is not None:
            _try_out(given, prepared, find_lr, micro_batch=micro_batch, say=say)
            return False

        training = set_up(
            prepared,
            folder=folder,
            bar=shown.bar,
            track=shown.track,
            micro_batch=micro_batch,
            before_run=lambda: _set_aside(place, say) if fresh else None,
        )
        if ranks.is_first:
            _note(training, place, is_new=stored is None, found=micro_batch == "auto")
        # Only now: nothing has prevented it, and no error is lost below many lines.
        _report_start(training, given, prepared, folder=folder, listener=shown.listener)
        _fit(training)
        return False


def _note(training: Training, place: RunFolder, *, is_new: bool, found: bool) -> None:
    """What later commands need to know of this start."""
    if found:  # a resume begins with what has fitted
        MicroBatches(training=training.run.state.micro_batch).write(place.path)
    if is_new:
        place.record_made_here()


def _try_out(
    given: Mapping[str, Any],
    prepared: Prepared,
    find_lr: Callable[[LRCurve], None] | None,
    *,
    micro_batch: int | Literal["auto"] | None,
    say: Callable[[str], None],
) -> None:
    """What leaves no run: a learning-rate range test if its curve is asked for, else a dry run."""
    ranks = join_ranks()
    ranks.first(lambda: _show(given, prepared, say=say))
    if find_lr is None:
        train_briefly(prepared, say=say, micro_batch=micro_batch)
    else:
        curve = try_rates(prepared, say=say, micro_batch=micro_batch)
        ranks.first(lambda: find_lr(curve))


def _with_number(given: Mapping[str, Any], /) -> dict[str, Any]:
    """Of a `batch_size` of 'auto:N' the number alone is a setting of the run."""
    given = {**given}
    if parse_batch_size(given.get("batch_size")).finds:
        num = parse_batch_size(given.pop("batch_size")).num
        given |= {} if num is None else {"batch_size": num}
    return given


@contextlib.contextmanager
def _ended_watch(ranks: Ranks) -> Iterator[None]:
    try:
        yield
    finally:
        ranks.end_watch()


@contextlib.contextmanager
def _out_of_memory_refused() -> Iterator[None]:
    """Out of memory is an error that the user can fix, wherever it happened."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        why = str(error).strip().partition("\n")[0]
        raise InputError(f"out of memory ({why:.200})\n{BY_FLAGS.save_memory}") from error


def _set_aside(place: RunFolder, say: Callable[[str], None]) -> None:
    aside = place.set_aside()
    if aside is not None:
        say(f"the run that was in {place.path} is now in {aside}")


def _open(
    settings: Settings, stored: ResolvedSettings | None, place: RunFolder, ranks: Ranks
) -> Prepared:
    """A run, new or stored, with nothing left open, and its data."""
    wanted = stored or settings
    if (
        stored is None and wanted.extend is not None
    ):  # also with --fresh, before the run is set aside
        raise InputError(
            f"extend = {wanted.extend!r} is for a finished run, and this would be a new one in {place.path}: "
            "leave it out, or name the folder of one"
        )
    check_download(settings.download, *([] if wanted.data is None else [wanted.data]))
    if wanted.download:
        ranks.first(lambda: bool(open_data(wanted)))  # one fetches, all read
    train, val = ranks.each(lambda: open_data(wanted))
    if stored is not None:
        resolved = stored
        facts = ranks.first(lambda: DataFacts.read(place.dataset))
    else:
        resolved, facts = ranks.first(lambda: resolve(settings, train, val))
    moved = None if stored is None else ranks.first(lambda: _moved(place, stored.data))
    ranks.each(lambda: check_unchanged(facts, train, val, settings=resolved, moved=moved))
    return Prepared(resolved, facts, train, val)


def _is_finished(settings: ResolvedSettings, place: RunFolder, say: Callable[[str], None]) -> bool:
    """Whether nothing is left to do, nor added now by `extend`."""
    extended = (place.read_config() or {}).get("extend")
    return finished(place, say=say) is not None and settings.extend == extended


def _moved(place: RunFolder, data: str | None) -> str | None:
    """Where a run has its data from, and that they are asked for at another place now; None if not."""
    before = (place.read_config() or {}).get("data")
    if before == data:
        return None
    names = [EMBEDDED_NAME if path is None else path for path in (before, data)]
    return f"the run in {place.path} is of {names[0]}, and {names[1]} is something else"


def _fit(training: Training) -> None:
    try:
        fit(training)
    except NotFinite as error:
        raise InputError(
            f"{error}; run it again with: flambeau train --replay-step {error.path}"
        ) from error
    finally:
        training.run.close()


def _stored(given: Mapping[str, Any], place: RunFolder) -> ResolvedSettings | None:
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
    place.check_same({k: v for k, v in stored.items() if k in given}, Identity(given, FIELDS))
    settings = dataclasses.replace(from_stored(stored, place.config), **given)
    if settings.extend is None or parse_duration(settings.extend, name="extend").amount:
        return settings
    return dataclasses.replace(settings, extend=None)  # taken back, if nothing of it was trained


def _check_code(
    settings: Settings,
    given: Mapping[str, Any] | None,
    place: RunFolder,
    *,
    trust: bool,
    say: Callable[[str], None],
) -> None:
    """Refuse code that only a folder names, unless its user has made that folder here or trusts it.

    `given` are the settings that the user gave to a run that exists; None for a new one.
    """
    ask_for_teacher(settings.teacher, trust=trust, say=say)
    stored = {} if given is None else place.read_config() or {}
    unnamed = [name for name in named_code(stored) if stored[name] != (given or {}).get(name)]
    if unnamed:
        place.permission(stored, trust=trust, say=say).ask_for(stored, *unnamed)
    elif named_code(stored):
        place.record_made_here()


def _check_outside(folder: Path, data: str | None) -> None:
    if data is not None and folder.resolve().is_relative_to(data):
        raise InputError(
            f"the run folder {folder} would lie within the data {data}, as one more class of them; "
            "name another one with --out"
        )


def _report_start(
    training: Training,
    given: Mapping[str, Any],
    prepared: Prepared,
    *,
    folder: Path,
    listener: Callable[[Mapping[str, Any]], None] | None,
) -> None:
    """What is about to be trained, for the user and for a program that listens."""
    progress, state = training.run.progress, training.run.state
    progress.listener = listener
    _show(given, prepared, say=progress.show)
    progress.show(f"the run is in {folder}")
    progress.emit(
        {
            "event": "start",
            "folder": str(folder),
            "step": state.step,
            "steps": training.run.plan.total_steps,
            "train_images": len(prepared.train),
            "val_images": len(prepared.val),
            "settings": values_of(prepared.settings),
            "given": [*given],
        }
    )


def _show(given: Mapping[str, Any], prepared: Prepared, *, say: Callable[[str], None]) -> None:
    """Every setting with its value, those that were given first: nothing is hidden."""
    settings = prepared.settings
    train = prepared.train
    val = prepared.val
    say(f"{len(train)} images to train on, {len(val)} to evaluate on")
    for line in class_lines(settings, train.labels, train.classes):
        first, *words = line.split(" ")
        say(_wrapped(first, words, indent=2))
    by_group: dict[str, list[str]] = {}
    for name, value in given.items():
        by_group.setdefault("given", []).append(f"{name}={value}")
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if value is not None and field.name not in ("data", *given):
            by_group.setdefault(field.metadata["group"], []).append(f"{field.name}={value}")
    for group, texts in by_group.items():
        say(_wrapped(f"  {group:<13}", texts, indent=16))


def _wrapped(head: str, texts: Sequence[str], *, indent: int) -> str:
    """Texts behind a heading, in lines that fit the terminal; none of them is broken."""
    lines = [head]
    width = columns()
    for text in texts:
        if text_width(lines[-1]) + 1 + text_width(text) > width and lines[-1] != head:
            lines.append(" " * (indent - 1))
        lines[-1] += f" {text}"
    return "\n".join(lines)
