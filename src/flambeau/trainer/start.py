"""A training from its settings to its end: the existing run, the data, the loop.

Shared by the command `flambeau train` and `flambeau.trainer.api.train`.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from flambeau.data.datasets.image_statistics import page_remarks
from flambeau.data.sources.data_names import check_download
from flambeau.data.sources.source import left_out_lines
from flambeau.data.sources.targets import task_of
from flambeau.data.sources.wide_source import of_kind
from flambeau.errors import InputError
from flambeau.parallel.ranks import Ranks, join_ranks
from flambeau.provenance import named_code
from flambeau.recipes.memory.batch_size_finder import is_out_of_memory
from flambeau.recipes.training.lr_range import LRCurve
from flambeau.run.folder.identity import Identity
from flambeau.run.folder.micro_batches_file import MicroBatches
from flambeau.run.folder.mirror import Mirror, fetch
from flambeau.run.folder.published_weights import finished
from flambeau.run.folder.run_folder import RunFolder
from flambeau.run.folder.store_run import copied_once, in_store
from flambeau.run.loop.nan_guard import NotFinite
from flambeau.run.options.durations import parse_duration
from flambeau.run.options.option import values_of
from flambeau.run.options.tracker_names import LineFunction
from flambeau.terminal import columns, text_width
from flambeau.trainer.dry_run import dry_run as train_briefly
from flambeau.trainer.find_lr import find_lr as try_rates
from flambeau.trainer.fit import Training, fit, set_up
from flambeau.trainer.parts.auto_settings import resolve
from flambeau.trainer.parts.data import (
    DataFacts,
    Prepared,
    check_cache,
    check_teacher_code,
    check_test,
    check_unchanged,
    open_data,
    with_test,
)
from flambeau.trainer.parts.optimizer import without_compiler
from flambeau.trainer.parts.pixel_lines import pixel_lines
from flambeau.trainer.settings.default_folder import EMBEDDED_NAME, check_outside
from flambeau.trainer.settings.resolved_settings import ResolvedSettings
from flambeau.trainer.settings.settings import BY_FLAGS, FIELDS, Settings, parse_batch_size
from flambeau.trainer.settings.stored_settings import from_stored
from flambeau.trainer.tasks.all_tasks import TASK_TYPES


@dataclasses.dataclass(frozen=True)
class ProgressOptions:
    """Who follows a training: `listener`, a program, gets events on the first process.

    `track`: functions of the lines of metrics.jsonl, besides the settings' trackers.
    """

    bar: bool = True
    listener: Callable[[Mapping[str, Any]], None] | None = None
    track: Sequence[LineFunction] = ()


@copied_once()  # its teachers and weights are those of one moment
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
    progress: ProgressOptions = ProgressOptions(),
) -> bool:
    """Train, or continue, with the watchdog between the processes running from start to end.

    Args:
        given: those that the user gave.
        find_lr: takes the curve of a learning-rate range test, made instead of the training.
        trust: as for `train`.
    """
    batch = parse_batch_size(settings.batch_size)
    given = _with_number(given)
    ranks = join_ranks()
    ranks.begin_watch(settings.stall_timeout)
    with _ended_watch(ranks), _out_of_memory_refused(), without_compiler():
        run_folder = RunFolder(folder, advice=BY_FLAGS)
        mirror = settings.mirror
        is_trial = dry_run or find_lr is not None
        if mirror is not None and not is_trial:
            ranks.first(lambda: _fetch_mirrored(folder, mirror, fresh=fresh, say=say))
        stored = None if fresh else ranks.first(lambda: _stored(given, run_folder))
        ranks.first(lambda: check_outside(folder, (stored or settings).data))
        resumed = None if stored is None else given
        ranks.first(
            lambda: _check_code(stored or settings, resumed, run_folder, trust=trust, say=say)
        )
        prepared = _open(settings, stored, run_folder, ranks)
        if stored is not None and ranks.first(lambda: _is_finished(stored, run_folder, say)):
            if not is_trial:
                ranks.first(lambda: _complete_mirror(folder, stored.mirror, say))
                return True
            ranks.first(lambda: say(f"the run in {folder} is finished, and stays as it is"))
        noted = None if stored is None else ranks.first(lambda: MicroBatches.read(folder).training)
        micro_batch: int | Literal["auto"] | None = noted or ("auto" if batch.finds else None)
        if is_trial:
            _try_out(given, prepared, find_lr, progress.listener, micro_batch=micro_batch, say=say)
            return False

        training = set_up(
            prepared,
            folder=folder,
            bar=progress.bar,
            track=progress.track,
            micro_batch=micro_batch,
            before_run=lambda: _set_aside(run_folder, say) if fresh else None,
        )
        if ranks.is_first and micro_batch == "auto":  # a resume starts with what has fitted
            MicroBatches(training=training.run.state.micro_batch).write(folder)
        if ranks.is_first and stored is None:
            run_folder.record_made_here()
        # Only now, so that many lines do not hide an error.
        _report_start(training, given, prepared, folder=folder, listener=progress.listener)
        _fit(training)
        return False


def _try_out(
    given: Mapping[str, Any],
    prepared: Prepared,
    find_lr: Callable[[LRCurve], None] | None,
    listener: Callable[[Mapping[str, Any]], None] | None,
    *,
    micro_batch: int | Literal["auto"] | None,
    say: Callable[[str], None],
) -> None:
    """A learning-rate range test if its curve is wanted, else a dry run; neither leaves anything."""
    ranks = join_ranks()
    ranks.first(lambda: _show(given, prepared, say=say))
    if find_lr is None:
        cost = train_briefly(prepared, say=say, micro_batch=micro_batch)
        if listener is not None and ranks.is_first:
            listener({"event": "dry_run", **dataclasses.asdict(cost)})
    else:
        curve = try_rates(prepared, say=say, micro_batch=micro_batch)
        ranks.first(lambda: find_lr(curve))


def _with_number(given: Mapping[str, Any], /) -> dict[str, Any]:
    """With the number of a `batch_size` of 'auto:N', which alone is a setting of the run."""
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
    """Raise InputError for out of memory anywhere, because the user can fix it."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        why = str(error).strip().partition("\n")[0]
        raise InputError(f"out of memory ({why:.200})\n{BY_FLAGS.save_memory}") from error


def _set_aside(folder: RunFolder, say: Callable[[str], None]) -> None:
    aside = folder.set_aside()
    if aside is not None:
        say(f"the run that was in {folder.path} is now in {aside}")


def _open(
    settings: Settings, stored: ResolvedSettings | None, folder: RunFolder, ranks: Ranks
) -> Prepared:
    """The settings of a new or stored run, with nothing left open, and its data."""
    wanted = stored or settings
    if (
        stored is None and wanted.extend is not None
    ):  # also with --fresh, before setting a run aside
        raise InputError(
            f"extend = {wanted.extend!r} is for a finished run, and this would be a new one in "
            f"{folder.path}: leave it out, or name the folder of one"
        )
    check_download(settings.download, *([] if wanted.data is None else [wanted.data]))
    check_cache(settings, wanted.data)
    if wanted.download:
        ranks.first(lambda: bool(open_data(wanted)))  # one downloads, all read
    train, val = ranks.each(lambda: open_data(wanted))
    if stored is not None:
        resolved = stored
        facts = ranks.first(lambda: DataFacts.read(folder.dataset))
    else:
        resolved, facts = ranks.first(lambda: resolve(settings, train, val))
    kept = wanted.test is not None
    if kept and stored is None:
        facts = ranks.first(lambda: with_test(facts, resolved, train, val))
    elif kept:
        ranks.first(lambda: bool(check_test(facts, resolved)))
    train, val = (of_kind(source, facts.pixels, facts.channels) for source in (train, val))
    moved = None if stored is None else ranks.first(lambda: _moved(folder, stored.data))
    ranks.each(lambda: check_unchanged(facts, train, val, settings=resolved, moved=moved))
    return Prepared(resolved, facts, train, val)


def _is_finished(settings: ResolvedSettings, folder: RunFolder, say: Callable[[str], None]) -> bool:
    """Whether nothing is left to do, and `extend` adds nothing."""
    extended = (folder.read_config() or {}).get("extend")
    return finished(folder, say=say) is not None and settings.extend == extended


def _fetch_mirrored(folder: Path, mirror: str, *, fresh: bool, say: Callable[[str], None]) -> None:
    said = fetch(folder, mirror, fresh=fresh, is_copy=in_store(folder, mirror) is not None)
    if said is not None:
        say(said)


def _complete_mirror(folder: Path, mirror: str | None, say: Callable[[str], None]) -> None:
    """Upload what a process that was killed after its result has not."""
    if mirror is not None:
        Mirror(folder, mirror, say=say).close()


def _moved(folder: RunFolder, data: str | None) -> str | None:
    """A sentence on where the data were and are now, if these differ; else None."""
    before = (folder.read_config() or {}).get("data")
    if before == data:
        return None
    names = [EMBEDDED_NAME if path is None else path for path in (before, data)]
    return f"the run in {folder.path} is of {names[0]}, and {names[1]} is something else"


def _fit(training: Training) -> None:
    try:
        fit(training)
    except NotFinite as error:
        raise InputError(
            f"{error}; run it again with: flambeau train --replay-step {error.path}"
        ) from error
    finally:
        training.run.close()


def _stored(given: Mapping[str, Any], folder: RunFolder) -> ResolvedSettings | None:
    """The settings of the run in the folder, with those given now; None for a new run."""
    stored = folder.read_config()
    if stored is None:
        return None
    if "model" not in stored:
        raise InputError(
            f"{folder.path} holds a run of a script, not of `flambeau train`\n"
            "Choose another folder with --out, or set this one aside with --fresh"
        )
    if folder.soup.exists() and given.get("extend") is not None:
        raise InputError(
            f"{folder.path} holds the average of several runs, which no training can be continued from\n"
            f"Begin a new run with it: --weights {folder.path} --out NEW"
        )
    # Compares even what a machine or an older default had chosen.
    folder.check_same({k: v for k, v in stored.items() if k in given}, Identity(given, FIELDS))
    settings = dataclasses.replace(from_stored(stored, folder.config), **given)
    if settings.extend is None or parse_duration(settings.extend, name="extend").amount:
        return settings
    return dataclasses.replace(settings, extend=None)  # withdrawn, if none of it was trained


def _check_code(
    settings: Settings,
    given: Mapping[str, Any] | None,
    folder: RunFolder,
    *,
    trust: bool,
    say: Callable[[str], None],
) -> None:
    """Refuse code that only a folder names, unless its user has made that folder here or trusts it.

    `given`: settings that the user gave to an existing run; None for a new one.
    """
    check_teacher_code(settings.teacher, trust=trust, say=say)
    stored = {} if given is None else folder.read_config() or {}
    unnamed = [name for name in named_code(stored) if stored[name] != (given or {}).get(name)]
    if unnamed:
        folder.permission(stored, trust=trust, say=say).ask_for(stored, *unnamed)
    elif named_code(stored):
        folder.record_made_here()


def _report_start(
    training: Training,
    given: Mapping[str, Any],
    prepared: Prepared,
    *,
    folder: Path,
    listener: Callable[[Mapping[str, Any]], None] | None,
) -> None:
    """Say what is about to be trained, to the user and to a listening program."""
    progress, state = training.run.progress, training.run.state
    progress.listener = listener
    _show(given, prepared, say=progress.show)
    address = in_store(folder, prepared.settings.mirror)
    progress.show(f"the run is in {folder}" + (f", and in {address}" if address else ""))
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
    """Print every setting with its value, given ones first."""
    settings = prepared.settings
    train = prepared.train
    val = prepared.val
    say(f"{len(train)} images to train on, {len(val)} to evaluate on")
    pages = page_remarks(train, val, channels=prepared.facts.channels)
    for line in (*left_out_lines(train, val), *pages):
        say(line)
    is_asked = "channels" in given or "bits" in given
    for line in pixel_lines(prepared.facts, settings, train, is_asked=is_asked):
        say(line)
    for line in TASK_TYPES[task_of(train)].target_lines(train, settings):
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
    """Texts after a heading, in lines that fit the terminal; no text is broken."""
    lines = [head]
    width = columns()
    for text in texts:
        if text_width(lines[-1]) + 1 + text_width(text) > width and lines[-1] != head:
            lines.append(" " * (indent - 1))
        lines[-1] += f" {text}"
    return "\n".join(lines)
