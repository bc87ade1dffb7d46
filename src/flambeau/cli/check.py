"""`flambeau check`: what is wrong with the data of a training."""

import argparse
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flambeau.cli.flags_from_settings import TARGETS, add_target_flags, given_targets
from flambeau.cli.reading_flags import (
    add_cache_flags,
    add_download,
    add_trust,
    cache_of_flags,
    check_at_least,
)
from flambeau.cli.table import print_json
from flambeau.data.check.finding import HARMFUL, KINDS, WITHOUT_IMAGES
from flambeau.errors import InputError, nearest
from flambeau.run.folder.store_run import run_here
from flambeau.terminal import print_text, say
from flambeau.trainer.settings.settings import Settings

if TYPE_CHECKING:
    from flambeau.data.check.check_data import DataCheck
    from flambeau.data.check.finding import Finding
    from flambeau.data.sources.source import Source
    from flambeau.data.sources.targets import TargetChoice

HELP = "find what is wrong with data: copies, leaks, unreadable and odd images, classes, names"

_EPILOG = f"""kinds of findings:
  {", ".join(KINDS[:8])},
  {", ".join(KINDS[8:])}"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    add = parser.add_argument
    add("data", metavar="DATA", help="what `flambeau train` takes")
    add(
        "--out",
        type=Path,
        metavar="FILE.csv",
        help="list the images that are left, for `flambeau train FILE.csv`; no image is changed or deleted",
    )
    add(
        "--drop",
        default=",".join(HARMFUL),
        metavar="KINDS",
        help="which findings --out leaves out, with commas between (default: %(default)s)",
    )
    add_target_flags(parser.add_argument_group("targets, as of `flambeau train`"))
    add("--force", action="store_true", help="replace the file of --out")
    add(
        "--model",
        metavar="RUN",
        help="a run on DATA: labels that look wrong by what it noted, and its accuracy with and without the "
        "validation images that can be seen in training",
    )
    add("--json", action="store_true", help="all that was found as one JSON object")
    add(
        "--workers",
        type=int,
        metavar="N",
        help="threads that read (default: one for each usable CPU)",
    )
    add_download(parser)
    add_cache_flags(parser)
    add_trust(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print what was found; 1 if there are images that a training is better without."""
    with cache_of_flags(arguments, arguments.data):
        return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    check_at_least(arguments, workers=1)
    kinds = _kinds(arguments.drop)
    path = Path(arguments.data)
    from flambeau.data.check.check_data import check_data
    from flambeau.data.check.clean_listing import require_new, write_listing
    from flambeau.data.check.report_text import report_lines
    from flambeau.data.sources.open_data import open_sources
    from flambeau.trainer.parts.data import target_choice

    model = None if arguments.model is None else run_here(arguments.model, say)
    choice = target_choice(Settings(**given_targets(arguments)))
    if model is not None and not given_targets(arguments):
        choice = replace(target_choice(Settings(**_targets_of(model))), of_others=True)
    # Check before an hour of work.
    train, val = open_sources(
        path, download=arguments.download, choice=choice, groups_may_cross=True
    )
    if arguments.out is not None:
        require_new(arguments.out, train, path, force=arguments.force)
    measure = _measured_run(model, trust=arguments.trust)
    check = check_data(train, val, path, threads=arguments.workers, progress=True)
    if model is not None:
        check = check.with_findings(_label_findings(model, check))
    facts = check.as_dict()
    lines = list(report_lines(check))
    if measure is not None:
        facts["model"] = measure(check)
        lines += ["", *_model_lines(arguments.model, facts["model"])]
    if arguments.json:
        print_json([facts])
    else:
        print_text("\n".join(lines))
    drop = check.to_drop(kinds)
    if arguments.out is None:
        return 1 if drop else 0
    count = write_listing(arguments.out, check.source, check.is_val, drop, group=choice.group)
    say(f"{count:,} images are left, {len(drop):,} are left out: {arguments.out}")
    words = [str(arguments.out), *_to_train(check.source, choice)]
    say(f"next: flambeau train {shlex.join(words)}")
    return 0


def _targets_of(run: Path) -> dict[str, Any]:
    """The settings of a run that say which targets of its data are meant."""
    from flambeau.run.folder.run_folder import RunFolder

    stored = RunFolder(run).read_existing()
    return {name: stored[name] for name in TARGETS if name in stored}


def _to_train(source: "Source", choice: "TargetChoice") -> Iterator[str]:
    """The flags that say of a listing of `source` what was said of the data."""
    from flambeau.data.sources.targets import kind_of_targets

    if choice.task is not None:
        yield from ("--task", choice.task)
    if choice.columns and kind_of_targets(source).is_table and choice.separator is None:
        yield from ("--target", ",".join(source.classes))
    if choice.separator is not None:
        yield from ("--label-separator", choice.separator)
    if choice.group is not None:
        yield from ("--group", choice.group)
    if choice.ignore_index is not None:
        yield from ("--ignore-index", str(choice.ignore_index))


def _kinds(text: str) -> list[str]:
    kinds = [word.strip() for word in text.split(",") if word.strip()]
    for kind in kinds:
        if kind in WITHOUT_IMAGES:
            raise InputError(
                f"--drop {kind}: this is not about single images, so none can be left out"
            )
        if kind not in KINDS:
            raise InputError(
                f"--drop {kind}: there is no such kind of finding{nearest(kind, KINDS)}\n"
                f"The kinds are {', '.join(kind for kind in KINDS if kind not in WITHOUT_IMAGES)}"
            )
    return kinds


def _label_findings(run: Path, check: "DataCheck") -> "list[Finding]":
    """Labels that look wrong by the losses that a run has recorded."""
    from flambeau.data.check.finding import of_single_images
    from flambeau.data.sources.targets import kind_of_targets
    from flambeau.run.folder.run_folder import RunFolder
    from flambeau.trainer.evaluation.sample_history import label_suspects, recorded_losses
    from flambeau.trainer.parts.data import DataFacts

    is_table = kind_of_targets(check.train).is_table
    if is_table and recorded_losses(run, check.train, most=1):
        task = DataFacts.read(RunFolder(run).dataset).task
        return of_single_images(
            "labels",
            "to train on whose target the run learned worst",
            "A wrong target contradicts what all other images teach; a rare or hard image may, too.",
            "Look at them, the most suspicious first; --drop labels leaves them out.",
            [
                (one["index"], f"{one['label']}: {one['predicted']} mean loss {one['loss']:.2f}")
                for one in task.suspects(run, check.train)
            ],
        )
    suspects = None if is_table else label_suspects(run, check.train)
    if suspects is None:
        say(f"{run} has no losses of these images (docs: Checking data, wrong labels)")
        return []
    return of_single_images(
        "labels",
        "to train on whose label the run learned worse than by guessing",
        "A wrong label contradicts what all other images teach; a rare or hard image may, too.",
        "Look at them, the most suspicious first; --drop labels leaves them out.",
        [(s.number, f"{s.label}, or {s.suggested}? mean loss {s.loss:.2f}") for s in suspects],
    )


def _measured_run(
    folder: Path | None, *, trust: bool
) -> "Callable[[DataCheck], dict[str, Any]] | None":
    """Measures a run on the validation images of a check; None if no run is named."""
    if folder is None:
        return None
    from flambeau.data.sources.open_data import with_classes
    from flambeau.trainer.api import measure
    from flambeau.trainer.prediction.trained_model import load_trained
    from flambeau.trainer.tasks.classification import Classification

    trained = load_trained(folder, trust=trust, say=say)
    if not isinstance(trained.facts.task, Classification):
        say(
            f"flambeau evaluate {folder} DATA has its figures: here they are those of classes alone"
        )
        return None

    def figures(check: "DataCheck") -> dict[str, Any]:
        if not trained.knows_its_data:
            say(f"what {folder} was trained on is not known, nor what it has seen of these images")
        elif trained.facts.train_fingerprint != check.train.fingerprint:
            say(f"{folder} was trained on other images than these: what it has seen is not known")
        val = with_classes(check.val, tuple(trained.facts.classes), "the model")
        result: Any = measure(trained, val, skip_bad_images=len(val), progress=True).predictions
        is_right = result.ranked[:, 0] == result.labels
        leaked = set(check.leaked)
        hits: dict[bool, list[bool]] = {True: [], False: []}
        for index, hit in zip(result.indices.tolist(), is_right.tolist(), strict=True):
            hits[index in leaked].append(hit)
        both = [*hits[True], *hits[False]]
        return {
            name: {"images": len(some), "accuracy": sum(some) / len(some) if some else None}
            for name, some in (("all", both), ("leaked", hits[True]), ("without", hits[False]))
        }

    return figures


def _model_lines(folder: str, figures: Mapping[str, Any]) -> Iterator[str]:
    yield f"Accuracy of {folder} on the validation images:"
    for name, what in (
        ("all", "all of them"),
        ("leaked", "those that can be seen in training, too"),
        ("without", "without those"),
    ):
        share, count = figures[name]["accuracy"], figures[name]["images"]
        shown = "none" if share is None else f"{share:.2%} of {count:,}"
        yield f"  {what}: {shown}"
