"""`flambeau verify --replay N`: whether a run is what its folder and its certificate say, as far as shown.

The verifier chooses the intervals: who has made the run cannot know which will be trained again.
"""

import dataclasses
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flambeau.compare.certificate import (
    NotWhole,
    certificate_differences,
    read_certificate,
    statement_of,
)
from flambeau.compare.interval_replay import (
    Interval,
    Outcome,
    intervals_of,
    replay_interval,
    why_other_bits,
)
from flambeau.compare.recorded_facts import RecordedFacts, read_facts
from flambeau.compare.replayed_run import settings_of
from flambeau.compare.saved_states import checkpoint_of, read_state, steps_of
from flambeau.data.sources.data_names import is_named
from flambeau.data.sources.path_format import shards_of
from flambeau.data.stores.address import is_address
from flambeau.errors import InputError
from flambeau.parallel.shard_layout import unsharded
from flambeau.provenance import named_code
from flambeau.recipes.checkpoints.atomic_checkpoint import CheckpointDamaged, read_checkpoint
from flambeau.regular_file import read_file
from flambeau.run.folder.published_weights import published
from flambeau.run.folder.run_folder import RunFolder
from flambeau.trainer.parts.data import DataChanged, Prepared, open_data, reopen_data
from flambeau.trainer.settings.resolved_settings import ResolvedSettings

_MAX = 10  # differences of a certificate that are shown


@dataclass(frozen=True)
class AuditOptions:
    """What is checked.

    Attributes:
        replays: intervals to train again; 0: hashes only.
        data: the verifier's own copy of the images; None: where the run has read them.
        trust: as for `load_trained`.
    """

    replays: int
    seed: int
    certificate: Path | None = None
    data: str | None = None
    trust: bool = False


@dataclass
class Audit:
    """The result: `lines` for people; `good` if nothing differs and all that was wanted could be shown."""

    lines: list[str] = field(default_factory=list)
    good: bool = True
    outcomes: list[Outcome] = field(default_factory=list)
    intervals: int = 0
    seen: dict[str, float] = field(default_factory=dict)

    def fail(self, text: str) -> None:
        self.lines.append(text)
        self.good = False

    def as_json(self) -> dict[str, Any]:
        return {
            "good": self.good,
            "lines": self.lines,
            "intervals": self.intervals,
            "replayed": [one.as_json() for one in self.outcomes],
            "seen": self.seen,
        }


def sources_of(path: Path, data: str | None = None) -> dict[str, Any]:
    """The images of a run of `flambeau train` whose data are no code; empty for any other."""
    facts = read_facts(path)
    if not facts.is_command or "data" in named_code(facts.folder.read_existing()):
        return {}
    train, val = open_data(_replay_settings(facts.folder, data))
    return {"train": train, "val": val}


def audit(path: Path, options: AuditOptions, *, say: Callable[[str], None]) -> Audit:
    """Check a run; nothing of it is written.

    InputError: there is nothing to replay, or a file or the data cannot be read.
    """
    facts = read_facts(path)
    result = Audit()
    if options.replays and not facts.is_command:
        raise InputError(
            f"{path} is of a script with its own Run, whose model and data are not in the folder: it cannot "
            "be replayed; --certificate FILE without --replay compares its hashes"
        )
    if options.certificate is not None:
        _check_certificate(path, options, options.certificate, result)
    try:
        _check_published(facts.folder, result)
    except CheckpointDamaged as error:
        result.fail(f"DAMAGED: {error}")
    if options.replays:
        _replay(facts, options, result, say=say)
    return result


def chance_to_see(intervals: int, forged: int, replayed: int) -> float:
    """How probable it is that at least one forged interval is among those replayed."""
    return 1 - math.comb(intervals - forged, replayed) / math.comb(intervals, replayed)


def _replay_settings(folder: RunFolder, data: str | None) -> ResolvedSettings:
    """The settings of a run, without those that change no number, perhaps with its data elsewhere."""
    settings = dataclasses.replace(settings_of(folder), track="none", mirror=None, verify_steps="0")
    if data is None:
        _require_there(settings)
        return settings
    elsewhere = is_named(data) or is_address(data)
    return dataclasses.replace(settings, data=data if elsewhere else str(Path(data).resolve()))


def _require_there(settings: ResolvedSettings) -> None:
    """InputError: the images of the run lie on another machine, or were moved."""
    there = settings.data
    if (
        there is None
        or is_named(there)
        or is_address(there)
        or "data" in named_code(vars(settings))
    ):
        return
    if not (Path(there).exists() or shards_of(Path(there))):
        raise InputError(
            f"{there}, from where the run has read its images, does not exist here: give your own copy of "
            "them with --data"
        )


def _check_certificate(path: Path, options: AuditOptions, certificate: Path, result: Audit) -> None:
    stated = read_certificate(certificate)
    try:
        now = statement_of(path, sources_of(path, options.data))
    except NotWhole as error:
        result.fail(f"NOT what the certificate says: {error}")
        return
    different = certificate_differences(stated, now)
    for text in different[:_MAX]:
        result.fail(f"NOT what the certificate says: {text}")
    if len(different) > _MAX:
        result.lines.append(f"... and {len(different) - _MAX} more differences")
    if not different:
        kept = len(now["predicate"]["checkpoints"])
        images = ", and the bytes of every image" if now["predicate"]["data"]["images"] else ""
        result.lines.append(
            f"folder and certificate have the same hashes: {kept} checkpoints, settings, metrics.jsonl, "
            f"published weights{images}"
        )


def _check_published(folder: RunFolder, result: Audit) -> None:
    """Compare model.safetensors and the figures in result.json with the checkpoint of their step."""
    outcome = published(folder)
    if outcome is None:
        if folder.weights.exists():
            result.fail(f"NOT shown: where {folder.weights.name} is from (result.json is missing)")
        return
    if outcome.weights == "soup" or outcome.step not in steps_of(folder.path):
        why = (
            "they are an average of several runs"
            if outcome.weights == "soup"
            else f"the checkpoint of step {outcome.step} is not kept"
        )
        result.fail(f"NOT shown: where the weights of {folder.weights.name} are from ({why})")
        return
    checkpoint = checkpoint_of(folder.path, outcome.step)
    files = unsharded(read_checkpoint(checkpoint).files)
    name = "ema.safetensors" if outcome.weights == "ema" else "model.safetensors"
    try:
        is_equal = read_file(folder.weights) == files.get(name)
    except OSError:
        is_equal = False
    if not is_equal:
        result.fail(f"FORGED or damaged: model.safetensors is not {name} of {checkpoint.name}")
    state = read_state(checkpoint).state
    figures = state.get("best", {}).get("metrics") if outcome.weights == "best" else None
    figures = state.get("metrics") if figures is None else figures
    if isinstance(figures, Mapping) and dict(figures) != dict(outcome.metrics):
        result.fail(f"FORGED or damaged: result.json has other figures than {checkpoint.name}")


def _replay(
    facts: RecordedFacts, options: AuditOptions, result: Audit, *, say: Callable[[str], None]
) -> None:
    folder = facts.folder
    settings = _replay_settings(folder, options.data)
    intervals, left_out = intervals_of(folder.path, extend=settings.extend)
    result.intervals = len(intervals)
    for text in left_out:
        result.lines.append(f"not shown: {text}")
        result.good &= "DAMAGED" not in text
    if not intervals:
        raise InputError(
            f"{folder.path} keeps no checkpoint at the end of an interval that can be trained again; "
            "--keep and --checkpoint-every of `flambeau train` decide how many are kept"
        )
    other = why_other_bits(facts, [one.end for one in intervals], settings)
    if other:
        result.fail(
            "NOT shown: this machine does not give the same bits as that of the training "
            f"({'; '.join(other)}), so that a replay would differ without a forgery; nothing was trained"
        )
        return
    permission = folder.permission(folder.read_existing(), trust=options.trust, say=say)
    try:
        prepared = reopen_data(settings, folder.dataset, permission)
    except DataChanged as error:
        result.fail(f"NOT what the run says: {str(error).partition(';')[0]}")
        return
    chosen = sorted(
        random.Random(options.seed).sample(intervals, min(options.replays, len(intervals)))
    )
    _replay_all(facts, prepared, chosen, result, say=say)
    _say_result(result, options.seed)


def _replay_all(
    facts: RecordedFacts,
    prepared: Prepared,
    chosen: Sequence[Interval],
    result: Audit,
    *,
    say: Callable[[str], None],
) -> None:
    for interval in chosen:
        say(f"training {interval} again")
        outcome = replay_interval(facts, prepared, interval)
        result.outcomes.append(outcome)
        if outcome.why_not is not None:
            result.fail(f"{interval}: could not be trained again: {outcome.why_not}")
        for text in outcome.differences:
            result.fail(f"{interval}: DIFFERS: {text}")
        if outcome.is_equal:
            result.lines.append(f"{interval}: equal to the bit ({outcome.seconds:.1f} s)")


def _say_result(result: Audit, seed: int) -> None:
    """What was shown, and with what confidence a forgery would have been seen."""
    total = result.intervals
    replayed = len(result.outcomes)
    wrong = [one.interval for one in result.outcomes if one.differences]
    lost = [one.interval for one in result.outcomes if one.why_not and not one.differences]
    chosen = f"{replayed} of {total} intervals, chosen with --seed {seed}"
    if wrong:
        named = ", ".join(map(str, wrong))
        result.lines.append(
            f"the run is NOT what its data, settings and seed give: {named} ({chosen}); the checkpoint at "
            "either end, the data, the settings or the figures are others than those of the training, or "
            "the machine that trained computed something wrong"
        )
        return
    if lost:
        named = ", ".join(map(str, lost))
        result.lines.append(f"NOT shown: {named} ({chosen}), which could not be trained again here")
        return
    result.lines.append(
        f"shown: {chosen}, give the same weights, averages, optimizer, generators, order of samples and "
        "figures, bit for bit, from the data, settings and seed of the run"
    )
    counts = sorted({1, 2, max(1, total // 4), max(1, total // 2)})
    result.seen = {
        str(forged): chance_to_see(total, forged, replayed) for forged in counts if forged <= total
    }
    chances = "; ".join(f"{forged} of them: {p:.0%}" for forged, p in result.seen.items())
    result.lines.append(f"had intervals been forged, this would have seen it: {chances}")
