"""A run folder: its files, who may write in it, and whether a command matches it."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flambeau.errors import InputError, unreadable
from flambeau.provenance import Permission, is_recorded, named_code, record
from flambeau.recipes.checkpoints.atomic_checkpoint import remove_leftovers, write_file
from flambeau.regular_file import read_file
from flambeau.run.folder.identity import Identity, differences
from flambeau.run.folder.lock import RunLock
from flambeau.run.options.advice import Advice
from flambeau.run.options.toml_file import as_toml, load_toml, parse_toml


class RunFolder:
    """Paths inside a run folder, its lock and its configuration.

    Nothing is made before `claim`.
    """

    def __init__(self, path: Path, *, advice: Advice = Advice()) -> None:
        self.path = path
        self.advice = advice
        self.config = path / "config.toml"
        self.dataset = path / "dataset.json"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.weights = path / "model.safetensors"
        self.result = path / "result.json"
        self.events = path / "events.jsonl"
        self.soup = path / "soup.json"
        self._lock = RunLock(path)
        self._new_config: bytes | None = None
        self._claimed: tuple[int, int] | None = None
        self._claimed_from = Path()

    def read_config(self) -> dict[str, Any] | None:
        """The folder's configuration; None where there is no run yet.

        InputError: the folder holds something else, or the file cannot be read.
        """
        try:
            return load_toml(self.config)
        except FileNotFoundError:
            pass
        except NotADirectoryError:
            file = next(p for p in (self.path, *self.path.parents) if p.exists())
            raise InputError(f"{file} is not a folder; choose another folder for the run") from None
        except (OSError, ValueError) as error:
            why = str(unreadable(self.config, error)) if isinstance(error, OSError) else None
            raise InputError(
                f"{why or f'{self.config} cannot be read: {error}'}; choose another folder"
            ) from error
        if self.path.exists():
            ours = {"checkpoints", "environment.json", "dataset.json"}  # left by a killed start
            foreign = sorted(
                p.name for p in self.path.iterdir() if p.name[0] != "." and p.name not in ours
            )
            if foreign:
                raise InputError(
                    f"{self.path} is not a run folder (it holds {foreign[0]!r} but no config.toml); "
                    "choose another folder"
                )
        return None

    def read_existing(self) -> dict[str, Any]:
        """The configuration of an existing run; InputError: it is no run folder, or cannot be read."""
        path = self.path
        if not path.exists():
            raise InputError(
                f"{path} does not exist: give the folder of a run, which `flambeau train` made"
            )
        run = run_around(path)
        hint = f", such as {run}, in which it lies" if run else ""
        if not path.is_dir():
            raise InputError(f"{path} is a file: give the folder of a run{hint}")
        try:
            return load_toml(self.config)
        except FileNotFoundError:
            why = f"there is no {self.config.name} in it; give the folder of a run{hint}"
            raise InputError(f"{path} is not a run folder: {why}") from None
        except OSError as error:
            raise unreadable(self.config, error) from error
        except ValueError as error:
            raise InputError(f"{self.config} cannot be read: {error}") from error

    def claim(self, identity: Identity, files: Mapping[str, bytes]) -> dict[str, Any] | None:
        """Make the folder, or continue in it and return its configuration; no other process may write in it
        then.

        Permitted changes of settings are written later, by `update_config`. InputError: a run of another
        configuration, or another process trains here.
        """
        toml = as_toml(identity.values)
        try:
            config = parse_toml(toml)  # as a resume will read it: no None, lists for tuples
        except ValueError as error:
            raise InputError(
                f"the configuration of a run is too large for a file: {error}"
            ) from error
        stored = self.read_config()
        if stored is not None:
            self.check_same(stored, dataclasses.replace(identity, values=config))
        elif "extend" in config:
            raise InputError(
                f"extend = {config['extend']!r} is for a finished run, and there is none in {self.path}: "
                "leave it out, or name the folder of one"
            )
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        self._lock.take()
        self._claimed = _inode(self.path)
        self._claimed_from = Path.cwd()
        remove_leftovers(self.path)  # of killed writes
        if stored is None:
            for name, content in files.items():
                write_file(self.path / name, content)
            write_file(self.config, toml)  # last: it makes the folder a run
        elif stored != config:  # in settings that a resume may change
            self._new_config = toml
        return stored

    def check_in_place(self) -> None:
        """Refuse to write where the claimed folder is no more: removed, renamed, or relative to elsewhere."""
        if self._claimed is None or _inode(self.path) == self._claimed:
            return
        whole = self._claimed_from / self.path
        if _inode(whole) == self._claimed:
            raise InputError(
                f"the working directory has changed since the run was made in {self.path}: it leads "
                f"elsewhere now: the run ends, and is whole in {whole}\nGive Run that path"
            )
        what = "is another folder now" if self.path.exists() else "is gone"
        raise InputError(
            f"{self.path} {what}: it was removed or renamed while the run trained in it, so the run ends.\n"
            "If it was renamed, the same command with its new name continues from its last checkpoint"
        )

    def permission(
        self, stored: Mapping[str, Any], *, trust: bool, say: Callable[[str], object]
    ) -> Permission:
        return Permission(self.path, self._is_recorded(stored), trust, say)

    def record_made_here(self) -> None:
        """Record that this user, on this machine, has named all code that the folder names."""
        with contextlib.suppress(OSError, ValueError):
            content = read_file(self.config)
            record_config(content, parse_toml(content))

    def _is_recorded(self, stored: Mapping[str, Any] | None = None) -> bool:
        """Whether this user has made the folder, with the configuration that was read."""
        try:
            content = read_file(self.config)
            config = parse_toml(content)
        except (OSError, ValueError):
            return False
        is_same = stored is None or config == stored
        return is_same and is_recorded(content, named_code(config).values())

    def update_config(self, *, only: Mapping[str, Any] | None = None) -> None:
        """Write the changed settings, or `only` these, to config.toml, after the checkpoint was loaded."""
        if self._new_config is None:
            return
        new = self._new_config
        if only is not None:
            stored = load_toml(self.config)
            changed = {**stored, **only}
            if changed == stored:
                return
            new = as_toml(changed)
        is_recorded_here = self._is_recorded()
        write_file(self.config, new)
        if is_recorded_here:
            record_config(new, parse_toml(new))
        self._new_config = None

    def check_same(self, stored: Mapping[str, Any], wanted: Identity) -> None:
        """Refuse a configuration with which a resume would not continue the same run."""
        config = wanted.values
        if "best" in stored and "best" in config and not self._has_logged(stored["best"]):
            chosen = {name: config[name] for name in ("best", "best_mode") if name in config}
            stored = {**stored, **chosen}
        different = differences(stored, wanted)
        if different:
            more = f" and {len(different) - 3} more" if len(different) > 3 else ""
            is_of_length = any(text.startswith("duration: ") for text in different)
            longer = f" ({self.advice.train_longer})" if is_of_length else ""
            raise InputError(
                f"{self.path} holds a run of another configuration ({'; '.join(different[:3])}{more}).\n"
                f"Give the same settings to continue it{longer}, or another folder; or "
                f"{self.advice.start_again}."
            )

    def _has_logged(self, metric: str) -> bool:
        """Whether metrics.jsonl holds a figure, which then may have chosen a checkpoint."""
        try:
            return f"{json.dumps(metric)}: ".encode() in read_file(self.metrics)
        except OSError:
            return True  # unknown

    def set_aside(self) -> Path | None:
        """Rename the folder to NAME.old-N if it exists; nothing is deleted."""
        if not self.path.exists():
            return None
        self.read_config()
        self._lock.take()
        path = self.path.absolute()
        number = 1
        while (target := path.with_name(f"{path.name}.old-{number}")).exists():
            number += 1
        path.rename(target)
        self.release()
        return target

    def tidy(self) -> None:
        """Remove what a power failure left in a finished run, unless another process uses it."""
        if any(self.checkpoints.glob(".*.removed")):
            with contextlib.suppress(InputError):
                self._lock.take()
                remove_leftovers(self.checkpoints)
                self.release()

    def release(self) -> None:
        self._lock.release()


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def record_config(content: bytes, config: Mapping[str, Any]) -> None:
    """Record the code that a configuration names; without such code no record is ever needed."""
    names = named_code(config).values()
    if names:
        record(content, names)


def run_around(path: Path) -> Path | None:
    """The run folder that contains a file or folder, at most three levels up."""
    for folder in path.absolute().parents[:3]:
        if (folder / "config.toml").is_file() and (folder / "checkpoints").is_dir():
            here = Path.cwd()
            return folder.relative_to(here) if folder.is_relative_to(here) else folder
    return None
