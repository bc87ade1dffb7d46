"""What two run folders record, and where it differs: settings, environment, data, machines of resumes.

Read without torch, up to a limit; a file that holds no table counts as empty.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flambeau.errors import InputError
from flambeau.run.folder.json_file import json_table, table
from flambeau.run.folder.run_folder import RunFolder
from flambeau.trainer.settings.settings import FIELDS

Kind = Literal["setting", "data", "environment", "history"]

_NO_EFFECT = {  # on any bit of a training, or on its figures
    "download",
    "skip_bad_images",
    "workers",
    "retry_workers",
    "recompute",
    "on_nan",
    "stop_within",
    "mirror",
    "stall_timeout",
    "verify_steps",
    "checkpoint_every",
    "keep",
    "log_every",
    "track",
}
_MACHINE_FACTS = {  # in environment.json, without effect on the bits by themselves
    "python",
    "platform",
    "default_device",
    "cpu_count",
    "usable_cpus",
    "usable_memory_bytes",
    "torch_threads",
    "rocm_build",
    "safetensors",
}
_HISTORY = ("rollbacks", "lr_scale", "stopped", "micro_batch")
_MAX = 2000  # facts of one file that are compared; a run has about a hundred


@dataclass(frozen=True)
class Difference:
    """A fact that differs between two runs.

    Attributes:
        kind: 'setting' (config.toml), 'data' (dataset.json), 'environment' (versions and machine), 'history'
            (a resume elsewhere, a rollback).
        values: in each run, if given.
        matters: it can change a number of training or evaluations.
        step: of the checkpoint that records it; None: from the beginning.
    """

    kind: Kind
    name: str
    values: tuple[Any, Any]
    matters: bool
    step: int | None = None


@dataclass(frozen=True)
class RecordedFacts:
    """What a run folder records, by name.

    Attributes:
        settings: config.toml, with the user's table as `config NAME`.
        exactness: what of it decides the rounding of sums.
        is_command: made by `flambeau train`.
    """

    folder: RunFolder
    settings: Mapping[str, Any]
    data: Mapping[str, Any]
    environment: Mapping[str, Any]
    exactness: Mapping[str, Any]
    is_command: bool


def read_facts(path: Path) -> RecordedFacts:
    """Read the small files of a run; InputError: it is no run folder."""
    folder = RunFolder(path)
    config = folder.read_existing()
    if not {"duration", "batch_size", "seed"} <= config.keys():
        raise InputError(
            f"{path} is not a run folder: its config.toml is of another program; give the folder of a run"
        )
    settings = {name: value for name, value in config.items() if name != "config"}
    settings |= {f"config {name}": value for name, value in table(config.get("config")).items()}
    environment = dict(json_table(path / "environment.json"))
    packages = table(environment.pop("packages", None))
    exactness = table(environment.pop("exactness", None))
    if (model := _model_text(environment.pop("model", None))) is not None:
        environment["model"] = model
    return RecordedFacts(
        folder,
        _limited(settings),
        _limited(json_table(folder.dataset)),
        _limited({**environment, **packages}),
        _limited(exactness),
        isinstance(config.get("model"), str),
    )


def fact_differences(left: RecordedFacts, right: RecordedFacts) -> list[Difference]:
    """All differences, causes before effects."""
    return [
        *_setting_differences(left, right),
        *_data_differences(left.data, right.data),
        *_environment_differences(left, right),
    ]


def history_differences(
    step: int, left: Mapping[str, Any], right: Mapping[str, Any], known: list[Difference]
) -> Iterator[Difference]:
    """What the `meta` of two checkpoints adds to the known differences: machines of resumes, rollbacks."""
    listed = {(one.kind, one.name, repr(one.values)) for one in known}
    tables = table(left.get("exactness")), table(right.get("exactness"))
    for name, values in _different(*tables):
        if ("environment", name, repr(values)) not in listed:
            yield Difference("history", f"resumed with {name}", values, matters=True, step=step)
    is_set = any(difference.name in ("batch_size", "accumulate") for difference in known)
    for name in _HISTORY:
        values = left.get(name), right.get(name)
        if name == "micro_batch" and (is_set or None in values):
            continue  # earlier versions did not write it
        if values[0] != values[1]:
            yield Difference("history", name, values, matters=True, step=step)


def _setting_differences(left: RecordedFacts, right: RecordedFacts) -> Iterator[Difference]:
    same_file = left.data.get("model_file_sha256") == right.data.get("model_file_sha256")
    same_teacher = left.data.get("teacher_sha256") == right.data.get("teacher_sha256")
    for name in _names(left.settings, right.settings):
        values = _setting(left, name), _setting(right, name)
        if values[0] == values[1]:
            continue
        matters = name not in _NO_EFFECT
        if name == "data":  # only their path; their content is in dataset.json
            matters = not (left.data and right.data)
        elif name == "model" and same_file and all(".py:" in str(value) for value in values):
            functions = [str(value).rpartition(":")[2] for value in values]
            matters = functions[0] != functions[1]
        elif name == "teacher" and None not in values:
            matters = not same_teacher
        elif name == "class_weights" and None not in values:
            # A file: its numbers are in dataset.json.
            matters = left.data.get(name) != right.data.get(name)
        yield Difference("setting", name, values, matters)


def _setting(run: RecordedFacts, name: str) -> Any:
    """A setting that an older version did not have counts as its default."""
    field = FIELDS.get(name) if run.is_command else None
    return run.settings.get(name, None if field is None else field.default)


def _data_differences(left: Mapping[str, Any], right: Mapping[str, Any]) -> Iterator[Difference]:
    if bool(left) != bool(right):
        yield Difference("data", "dataset.json", (bool(left), bool(right)), matters=True)
        return
    for name, values in _different(left, right):
        if name.endswith("_content") and None in values:
            continue  # version 0.1 did not write it
        yield Difference("data", name, values, matters=True)


def _environment_differences(left: RecordedFacts, right: RecordedFacts) -> Iterator[Difference]:
    exact = list(_different(left.exactness, right.exactness))
    listed = {name for name, _ in exact}
    for name, values in exact:
        yield Difference("environment", name, values, matters=True)
    for name, values in _different(left.environment, right.environment):
        if name == "model" and None in values:
            continue  # earlier versions did not write it
        if name not in listed:
            yield Difference("environment", name, values, matters=name not in _MACHINE_FACTS)


def _model_text(recorded: object) -> str | None:
    """The model of environment.json in a few words."""
    model = table(recorded)
    name, parameters = model.get("class"), model.get("parameters")
    if not isinstance(name, str) or type(parameters) is not int:
        return None
    return f"{name} with {parameters:,} parameters"


def _different(
    left: Mapping[str, Any], right: Mapping[str, Any]
) -> Iterator[tuple[str, tuple[Any, Any]]]:
    for name in _names(left, right):
        values = left.get(name), right.get(name)
        if values[0] != values[1]:
            yield name, values


def _names(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys([*left, *right]))


def _limited(facts: Mapping[str, Any]) -> dict[str, Any]:
    return dict(list(facts.items())[:_MAX])
