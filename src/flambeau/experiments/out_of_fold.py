"""What the folds of a trial say together: predictions of all images, by models that have not seen them."""

import csv
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flambeau.experiments.result import Trial, by_fold
from flambeau.experiments.spread import spread_of
from flambeau.experiments.sweeper import Experiment
from flambeau.recipes.checkpoints.atomic_checkpoint import write_file
from flambeau.run.folder.json_file import finite_number, json_table, table
from flambeau.run.folder.metrics_log import json_numbers


def write_out_of_fold(
    path: Path, trial: Trial, experiment: Experiment, *, say: Callable[[str], None]
) -> None:
    """Write a CSV file as `flambeau evaluate --out`, with each row's fold (and seed), unless it exists."""
    if path.exists():
        return
    from flambeau.trainer.evaluation.predictions_file import predictions_file

    names = list(experiment.members[0].settings)
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory(prefix="flambeau-folds-") as folder:
        for number, (member, run) in enumerate(zip(experiment.members, trial.runs, strict=True)):
            made = Path(folder) / f"{number}.csv"
            _evaluated(run, trust=experiment.trust, say=say).save_predictions(made)
            with made.open(encoding="utf-8", newline="") as file:
                columns, *cells = csv.reader(file)
            marks = [str(member.settings[name]) for name in names]
            rows += [[*marks, *row] for row in cells]
    with predictions_file(path, [*names, *columns]) as add:
        for row in rows:
            add(row)


def _evaluated(run: Path, *, trust: bool, say: Callable[[str], None]) -> Any:
    """The evaluation of a run on the images that it has held out."""
    from flambeau.trainer.api import measure
    from flambeau.trainer.parts.data import open_data
    from flambeau.trainer.prediction.trained_model import load_trained

    trained = load_trained(run, trust=trust, say=say)
    return measure(trained, open_data(trained.settings)[1])


def figures_of(trial: Trial, experiment: Experiment) -> dict[str, dict[str, Any]]:
    """Each figure of the published weights of a trial's runs: mean, spread and interval."""
    found = [table(json_table(run / "result.json").get("metrics")) for run in trial.runs]
    figures: dict[str, dict[str, Any]] = {}
    for name in found[0]:
        values = [finite_number(one.get(name)) for one in found]
        known = [value for value in values if value is not None]
        if len(known) == len(found):
            spread = spread_of(by_fold(known, experiment), folds=experiment.folds > 0)
            figures[name] = {**asdict(spread), "values": known}
    return figures


def write_figures(path: Path, trials: Sequence[Trial], experiment: Experiment) -> None:
    """Write those of all trials trained to the end, by number, as JSON."""
    content = {
        str(trial.number): {
            "settings": dict(trial.settings),
            "figures": {
                name: json_numbers(figure) for name, figure in figures_of(trial, experiment).items()
            },
        }
        for trial in trials
        if trial.state == "whole" and trial.value is not None
    }
    write_file(path, json.dumps(content, indent=1).encode() + b"\n")
