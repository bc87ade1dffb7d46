"""Data sets of Hugging Face: from the Hub by name, and folders of `save_to_disk`.

Source: Hugging Face datasets 5.2: `load_dataset`, whose Arrow files are then read like any others; and the
layout of `Dataset.save_to_disk` and `DatasetDict.save_to_disk`.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flambeau.data.sources.arrays.array_roles import TRAIN_PARTS, VAL_PARTS
from flambeau.data.sources.listing import split
from flambeau.data.sources.source import ConcatSource, Source, parts_of
from flambeau.data.sources.tables.arrow_file import open_arrow
from flambeau.data.sources.targets import FOUND, TargetChoice, as_learned
from flambeau.errors import DamagedData, InputError, json_object
from flambeau.optional_packages import extra

_MAX_FACTS = 1 << 24  # bytes of a .json of a saved folder

# In a separate process: the import takes seconds and 200 MB and starts threads, which the training and its
# forked workers would inherit. Only that process gets the environment variables.
_LOAD = """
import json, sys
try:
    import datasets
    splits = datasets.load_dataset(sys.argv[1], sys.argv[2] or None)
    answer = {name: [file["filename"] for file in part.cache_files] for name, part in splits.items()}
except Exception as error:  # reported by the parent process
    answer = f"{type(error).__name__}: {error}"
print("\\n" + json.dumps(answer))
"""


def open_hub(
    name: str, *, download: bool, labelled: bool = True, choice: TargetChoice = FOUND
) -> tuple[Source, Source | None]:
    """The images of a data set to train on, the split `train` or the only one, and to validate on.

    `name` is NAME or NAME:CONFIG of the Hub, or a folder, as for `load_dataset`; without `download` only what
    `datasets` loaded before is read.
    """
    if importlib.util.find_spec("datasets") is None:
        extra("datasets", what=f"hf:{name}")
    path, _, config = name.partition(":")
    if path.startswith((".", "/", "~")) and not Path(path).is_dir():
        raise InputError(f"hf:{name}: there is no folder {path}")
    # By default the hub reports each failed attempt to connect, with the words of a traceback.
    variables = {"HF_HUB_VERBOSITY": "error"}
    variables |= {} if download else {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    ran = subprocess.run(
        [sys.executable, "-P", "-c", _LOAD, path, config],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env={**os.environ, **variables},
        check=False,
        text=True,
    )
    lines = ran.stdout.splitlines()
    result: Any = json.loads(lines[-1]) if lines and not ran.returncode else None
    if isinstance(result, dict):
        if not all(result.values()):
            raise InputError(
                f"hf:{name} is held in memory and not in files\nUnset HF_DATASETS_IN_MEMORY_MAX_SIZE"
            )
        splits = {split: list(map(Path, files)) for split, files in result.items()}
        try:
            return _parts(f"hf:{name}", splits, labelled=True, choice=choice)
        except InputError:
            if labelled:
                raise
        return _parts(f"hf:{name}", splits, labelled=False, choice=choice)
    reason = " ".join(str(result).split())[:300] if result else f"exit code {ran.returncode}"
    if reason.startswith(("ConnectionError", "OfflineModeIsEnabled")):
        copied = "copy ~/.cache/huggingface from a machine that has it"
        why = (
            f"cannot be fetched: https://huggingface.co does not answer; try later, or {copied}"
            if download
            else f"is not on this machine: --download fetches it; without internet, {copied}"
        )
        raise InputError(f"hf:{name} {why}, or name a folder of save_to_disk or .parquet files")
    raise InputError(f"hf:{name} cannot be loaded: {reason}\nLook at its name on huggingface.co")


def open_saved(
    folder: Path, *, labelled: bool = True, choice: TargetChoice = FOUND
) -> tuple[Source, Source | None]:
    """The images of a folder written by `save_to_disk`; parts as in `open_hub`."""
    splits = _saved_splits(folder)
    if "" in splits:
        source = _joined(splits[""], labelled, choice)
        return split(source, parts_of(source))
    return _parts(str(folder), splits, labelled=labelled, choice=choice)


def saved_files(folder: Path) -> list[Path]:
    """All Arrow files of a folder written by `save_to_disk`; InputError if it is damaged."""
    return [file for files in _saved_splits(folder).values() for file in files]


def _parts(
    what: str, splits: Mapping[str, Sequence[Path]], *, labelled: bool, choice: TargetChoice
) -> tuple[Source, Source | None]:
    train = next((name for name in TRAIN_PARTS if name in splits), None)
    val = next((name for name in VAL_PARTS if name in splits), None)
    if train is None and len(splits) == 1:
        train = next(iter(splits))
        val = None
    if train is None:
        raise InputError(
            f"{what} has the splits {', '.join(splits) or 'none'}; which to train on is not known\n"
            "Expected one called train, and one called validation or test"
        )
    if val is not None and choice.split is not None and choice.is_wish:
        raise InputError(
            f"{what} has the splits {', '.join(splits)} already\nLeave --split out, or name a data set "
            "of one split"
        )
    opened = _joined(splits[train], labelled, choice)
    if val is None:
        return split(opened, parts_of(opened))
    return opened, _joined(splits[val], labelled, as_learned(opened, choice))


def _joined(files: Sequence[Path], labelled: bool, choice: TargetChoice) -> Source:
    sources = [open_arrow(file, labelled=labelled, choice=choice) for file in files]
    return sources[0] if len(sources) == 1 else ConcatSource(sources)


def _saved_splits(folder: Path) -> dict[str, list[Path]]:
    """The Arrow files of each split; those of a data set without splits under ''."""
    path = folder / "dataset_dict.json"
    if not path.is_file():
        return {"": _split_files(folder)}
    splits = _words(path, _json(path).get("splits"))
    return {name: _split_files(folder / name) for name in splits}


def _split_files(folder: Path) -> list[Path]:
    path = folder / "state.json"
    files = _json(path).get("_data_files")
    names = [file.get("filename") if isinstance(file, dict) else None for file in files or []]
    return [folder / name for name in _words(path, names)]


def _words(path: Path, names: Any) -> list[str]:
    """A list of at least one plain file name from a JSON file, checked: no path may lead elsewhere."""
    is_list = isinstance(names, list) and bool(names)
    if not is_list or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise DamagedData(
            f"{path} names no files of a data set\nMake the folder again, with save_to_disk"
        )
    return list(names)


def _json(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            facts = json.loads(file.read(_MAX_FACTS), object_pairs_hook=json_object)
    except (ValueError, RecursionError, OSError) as error:
        raise DamagedData(
            f"{path} cannot be read: {error}\nMake the folder again, with save_to_disk"
        ) from error
    if not isinstance(facts, dict):
        raise DamagedData(f"{path} is no JSON object\nMake the folder again, with save_to_disk")
    return facts
