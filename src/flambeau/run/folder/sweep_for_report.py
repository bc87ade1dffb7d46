"""What a report shows of the sweep that has trained its runs, read without torch.

What cannot be read, or is not what a sweep writes, is left out.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flambeau.report.sweep_panels import ReportedSweep
from flambeau.run.folder.json_file import json_row, json_table
from flambeau.run.folder.report_file import looked_at
from flambeau.run.folder.summary import TRIAL, sweep_of
from flambeau.run.options.toml_file import load_toml

_MAX_BYTES = 2**26  # of sweep.jsonl
_MAX_FOLDS = 100


def read_sweep(folders: Sequence[Path], names: Mapping[Path, str]) -> ReportedSweep | None:
    """The sweep of these runs, if all are of one; `names`: in the report."""
    roots = {sweep_of(folder) for folder in folders}
    root = roots.pop()
    if roots or root is None or len(folders) < 2:
        return None
    try:
        stored = load_toml(root / "sweep.toml")
    except (OSError, ValueError):
        return None
    count = stored.get("folds")
    settings = _settings(root / "sweep.jsonl")
    places: dict[str, tuple[int, int | None]] = {}
    for folder in folders:
        found = TRIAL.fullmatch(folder.resolve().name)
        if found is not None:
            fold = found["fold"]
            places[names[folder]] = int(found["trial"]), None if fold is None else int(fold)
    return ReportedSweep(
        figure=str(stored.get("figure")),
        is_max=stored.get("mode") != "min",
        folds=count if type(count) is int and 0 <= count <= _MAX_FOLDS else 0,
        choices={name: settings.get(trial, {}) for name, (trial, _) in places.items()},
        places=places,
        importance=json_table(root / "importance.json"),
        test=looked_at(json_table(root / "test.json")),
    )


def _settings(path: Path) -> dict[int, Mapping[str, Any]]:
    """The searched settings of each trial."""
    try:
        with path.open("rb") as file:
            lines = file.read(_MAX_BYTES).splitlines()
    except OSError:
        return {}
    found: dict[int, Mapping[str, Any]] = {}
    for line in lines:
        row = json_row(line) or {}
        trial, settings = row.get("trial"), row.get("settings")
        if type(trial) is int and isinstance(settings, dict):
            found.setdefault(trial, settings)
    return found
