"""One JSON file with the hashes of all that a run was made of and has left, as an in-toto Statement v1.

https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md: `subject` is what was made, the
predicate says of what and how. The bytes are a function of the folder and the data, so that a signature of
them can be checked against a new one. It names no path of a machine, and nothing of the user's `config`.
"""

import hashlib
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flambeau.data.sources.source import Source, mask_of
from flambeau.errors import InputError, unreadable
from flambeau.images.decode import Stored
from flambeau.provenance import named_code
from flambeau.recipes.checkpoints.atomic_checkpoint import (
    MANIFEST,
    CheckpointDamaged,
    checkpoint_folders,
    verify_checkpoint,
)
from flambeau.run.folder.checkpointer import check_name
from flambeau.run.folder.json_file import json_file, json_table, table
from flambeau.run.folder.published_weights import published
from flambeau.run.folder.run_folder import RunFolder
from flambeau.run.options.option import options_of
from flambeau.run.options.run_options import RunOptions
from flambeau.trainer.settings.settings import FIELDS

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "tag:flambeau,2026:training-run/v1"
_LEFT_OUT = {"mirror", "cache", "track", "workers", "retry_workers", "download", "config"}
"""Settings that say where and with what help, and change no bit; an address may hold a password, and so may
the user's own table."""
_OF_SCRIPT = {"optimizer", "schedule", "param_groups", "sampler"}  # besides the options of Run
# Of environment.json: no name of the machine, nor of its user.
_MACHINE = (
    "python", "torch", "packages", "cuda_build", "cudnn", "driver", "gpus", "cpu", "cpu_features",
    "exactness",
)  # fmt: skip
# Of dataset.json.
_DATA = (
    "classes", "train_samples", "val_samples", "test_samples", "train_fingerprint", "val_fingerprint",
    "test_fingerprint", "train_content", "val_content", "train_names", "model_file_sha256", "teacher_sha256",
)  # fmt: skip
_SHOWN = 40  # characters of a value; a hash has 64
_POSITION = ("step", "epoch", "position", "order_crc", "rollbacks", "lr_scale")


class NotWhole(InputError):
    """A file of the run is not what the run has written."""


def statement_of(path: Path, sources: Mapping[str, Source]) -> dict[str, Any]:
    """The certificate of a run.

    Args:
        sources: its images by the part, 'train' and 'val'; empty if they are not read.

    Raises:
        NotWhole: a file has changed since it was written.
    """
    folder = RunFolder(path)
    config = folder.read_existing()
    is_command = isinstance(config.get("model"), str)
    environment = json_table(path / "environment.json")
    data = json_table(folder.dataset)
    checkpoints = [_checkpoint(one, folder) for one in checkpoint_folders(folder.checkpoints)]
    if not checkpoints:
        raise NotWhole(f"{path} keeps no checkpoint: there is nothing to certify")
    predicate = {
        "made_by": "flambeau train" if is_command else "a script with its own Run",
        "replayable": is_command,
        "data": {
            **{name: data[name] for name in _DATA if data.get(name) is not None},
            "images": {part: images_digest(source) for part, source in sources.items()},
        },
        "settings": _settings(config, is_command=is_command),
        "config_sha256": _sha256(folder.config),
        "code": sorted(named_code(config)),
        "machine": {name: environment[name] for name in _MACHINE if name in environment},
        "checkpoints": checkpoints,
        "published": _published(folder),
    }
    if not is_command:
        predicate["not_shown"] = (
            "the code of the script, its model and its data are not in the folder: hashes only, no replay"
        )
    return {
        "_type": STATEMENT,
        "subject": list(_subjects(predicate)),
        "predicateType": PREDICATE,
        "predicate": predicate,
    }


def as_bytes(statement: Mapping[str, Any]) -> bytes:
    """The file of a certificate: sorted names, so that equal runs have equal bytes."""
    text = json.dumps(statement, indent=2, sort_keys=True, ensure_ascii=True, allow_nan=False)
    return text.encode() + b"\n"


def read_certificate(path: Path) -> dict[str, Any]:
    try:
        content = json_file(path)
    except FileNotFoundError:
        raise InputError(f"{path} does not exist: `flambeau certify RUN` writes one") from None
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError as error:
        raise InputError(f"{path} is no certificate: {error}") from None
    if not isinstance(content, dict) or content.get("predicateType") != PREDICATE:
        raise InputError(f"{path} is no certificate of a run: `flambeau certify RUN` writes one")
    return content


def certificate_differences(certificate: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What the folder and the data are not, of what the certificate says, one line each."""
    then, here = dict(_leaves("", certificate)), dict(_leaves("", now))
    texts = []
    one_sided = ""  # an entry that is on one side alone; what it holds comes next, and is so, too
    for name in dict.fromkeys([*then, *here]):
        if name in then and name in here and then[name] == here[name]:
            continue
        if one_sided and name.startswith(f"{one_sided}."):
            continue
        if name not in here:
            what = "is missing now"
        elif name not in then:
            what = "is not in the certificate"
        else:
            what = _other_value(then[name], here[name])
        if name not in here or name not in then:
            one_sided = name
        texts.append(f"{name.removeprefix('predicate.')} {what}")
    return texts


def _other_value(then: Any, here: Any) -> str:
    """In words; hashes, long texts and lists are not shown."""
    if all(len(repr(value)) <= _SHOWN for value in (then, here)):
        return f"is {here!r}, and {then!r} in the certificate"
    return "is not what it was"


def images_digest(source: Source) -> dict[str, Any]:
    """SHA-256 over name, label, mask and stored bytes of every image, in the order of the source."""
    whole = hashlib.sha256()
    for index, name in enumerate(source.names):
        label = source.labels[index].tolist()
        whole.update(f"{json.dumps(str(name))} {json.dumps(label)} ".encode())
        try:
            parts = source.read(index), mask_of(source, index)
        except OSError:
            whole.update(b"unreadable\n")  # a training may leave such images out
            continue
        for part in parts:
            whole.update(_content_digest(part))
    return {"images": len(source), "sha256": whole.hexdigest()}


def _content_digest(content: Stored | None) -> bytes:
    if content is None:
        return b""
    if isinstance(content, bytes):
        return hashlib.sha256(content).digest()
    head = f"{content.dtype} {content.shape} ".encode()
    return hashlib.sha256(head + np.ascontiguousarray(content).tobytes()).digest()


def _checkpoint(checkpoint: Path, folder: RunFolder) -> dict[str, Any]:
    try:
        meta = verify_checkpoint(checkpoint)
        check_name(checkpoint, meta)
    except CheckpointDamaged as error:
        raise NotWhole(str(error)) from error
    size = meta.get("metrics_bytes", 0)
    content = b""
    if folder.metrics.is_file():
        with folder.metrics.open("rb") as file:
            content = file.read(size)
    crc32 = meta.get("metrics_crc32")
    if len(content) != size or (crc32 is not None and zlib.crc32(content) != crc32):
        raise NotWhole(f"{folder.metrics} is not what it was at {checkpoint.name}")
    files = json_file(checkpoint / MANIFEST)["files"]
    return {
        "name": checkpoint.name,
        **{name: meta[name] for name in _POSITION if name in meta},
        "exactness": meta.get("exactness"),
        "files": {
            MANIFEST: _sha256(checkpoint / MANIFEST),
            **{name: entry["sha256"] for name, entry in files.items()},
        },
        "metrics": {"bytes": size, "sha256": hashlib.sha256(content).hexdigest()},
    }


def _published(folder: RunFolder) -> dict[str, Any] | None:
    result = published(folder)
    if result is None or not folder.weights.is_file():
        return None
    digest = _sha256(folder.weights)
    if result.sha256 not in (None, digest):
        raise NotWhole(f"{folder.weights} is not what the run has written")
    return {
        "weights": result.weights,
        "step": result.step,
        "metrics": dict(result.metrics),
        "sha256": digest,
    }


def _subjects(predicate: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if predicate["published"] is not None:
        yield {
            "name": "model.safetensors",
            "digest": {"sha256": predicate["published"]["sha256"]},
        }
    for one in predicate["checkpoints"]:
        for name, digest in sorted(one["files"].items()):
            yield {"name": f"checkpoints/{one['name']}/{name}", "digest": {"sha256": digest}}


def _settings(config: Mapping[str, Any], *, is_command: bool) -> dict[str, Any]:
    known = FIELDS.keys() | {"extend"} if is_command else options_of(RunOptions).keys() | _OF_SCRIPT
    chosen = {name: config[name] for name in config if name in known and name not in _LEFT_OUT}
    return {name: _without_place(value) for name, value in chosen.items()}


def _without_place(value: Any) -> Any:
    """The value with the last part of a path or an address alone."""
    if not isinstance(value, str) or not re.search(r"[/\\]", value):
        return value
    parts = [re.split(r"[/\\]", one.rstrip("/\\"))[-1].split("?")[0] for one in value.split(",")]
    return ",".join(parts)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _leaves(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(f"{prefix}.{name}" if prefix else str(name), inner)
    elif isinstance(value, list) and all(isinstance(one, dict) and "name" in one for one in value):
        for one in value:
            yield f"{prefix} {one['name']}", "listed"
            yield from _leaves(f"{prefix} {one['name']}", table(one))
    else:
        yield prefix, value
