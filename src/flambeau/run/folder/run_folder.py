"""The folder of a run: what lies where, who may write in it, and whether a command fits it."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flambeau.errors import InputError, unreadable
from flambeau.provenance import Permission, is_recorded, named_code, record
from flambeau.recipes.checkpoints.atomic_checkpoint import remove_leftovers, write_file
from flambeau.run.folder.identity import Identity, differences
from flambeau.run.folder.lock import RunLock
from flambeau.run.options.advice import Advice
from flambeau.run.options.toml_file import as_toml, load_toml, parse_toml


class RunFolder:
    """Paths inside a run folder, its lock and its configuration.

    Args:
        path: of the folder; nothing is made before `claim`.
        advice: what messages advise.
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
        self._lock = RunLock(path)
        self._new_config: bytes | None = None

    def read_config(self) -> dict[str, Any] | None:
        """The configuration that the folder was made with; None where there is no run yet.

        Raises:
            InputError: something is there that is not a run, or the file is unreadable.
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
            ours = {"checkpoints", "environment.json", "dataset.json"}  # of a start that was killed
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
        """The configuration of a run that is to be read, and not trained.

        Raises:
            InputError: it is no folder of a run, or its configuration is unreadable.
        """
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
        """Make the folder or continue in it; from here on no other process may write in it.

        What a resume may change is written by `update_config`.

        Args:
            identity: of the run; its values are what config.toml holds.
            files: what else a new folder gets, by name.

        Returns:
            The configuration that was there; None in a new folder.

        Raises:
            InputError: a run of another configuration, or another process trains here now.
        """
        toml = as_toml(identity.values)
        try:
            config = parse_toml(toml)  # as it will be read: no None, lists for tuples
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
        remove_leftovers(self.path)  # of files whose writing was killed
        if stored is None:
            for name, content in files.items():
                write_file(self.path / name, content)
            write_file(self.config, toml)  # last: with it the folder is a run
        elif stored != config:  # in what a resume may change
            self._new_config = toml
        return stored

    def permission(
        self, stored: Mapping[str, Any], *, trust: bool, say: Callable[[str], object]
    ) -> Permission:
        """Whether the code that its configuration names may be run.

        Args:
            stored: the configuration, as it was read.
            trust: the user says that it may.
            say: takes the line that names what is run.
        """
        return Permission(self.path, self._is_own(stored), trust, say)

    def note_own(self) -> None:
        """Record that its user has named, now and here, all code that it names."""
        with contextlib.suppress(OSError, ValueError):
            content = self.config.read_bytes()
            record_config(content, parse_toml(content))

    def _is_own(self, stored: Mapping[str, Any] | None = None) -> bool:
        """Whether this user has made it, with the configuration that was read of it."""
        try:
            content = self.config.read_bytes()
            config = parse_toml(content)
        except (OSError, ValueError):
            return False
        is_same = stored is None or config == stored
        return is_same and is_recorded(content, named_code(config).values())

    def update_config(self) -> None:
        """Let config.toml say what holds now, once the checkpoint has turned out to fit."""
        if self._new_config is not None:
            own = self._is_own()
            write_file(self.config, self._new_config)
            if own:
                record_config(self._new_config, parse_toml(self._new_config))
            self._new_config = None

    def check_same(self, stored: Mapping[str, Any], wanted: Identity) -> None:
        """Refuse a configuration under which a resume would not continue the same run."""
        config = wanted.values
        if "best" in stored and "best" in config and not self._has_logged(stored["best"]):
            stored = {**stored, **{name: config[name] for name in ("best", "best_mode")}}
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
        """Whether metrics.jsonl holds a figure, so that it may have chosen a checkpoint."""
        try:
            return f"{json.dumps(metric)}: ".encode() in self.metrics.read_bytes()
        except OSError:
            return True  # not known

    def set_aside(self) -> Path | None:
        """Rename the folder to NAME.old-N, if there is one; nothing is deleted."""
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
        """Remove what a power cut has left in a finished run, unless a process is at work there."""
        if any(self.checkpoints.glob(".*.removed")):
            with contextlib.suppress(InputError):
                self._lock.take()
                remove_leftovers(self.checkpoints)
                self.release()

    def release(self) -> None:
        """Let other processes write here again."""
        self._lock.release()


def record_config(content: bytes, config: Mapping[str, Any]) -> None:
    """Leave a record of a run that names code: of others none is ever asked for."""
    names = named_code(config).values()
    if names:
        record(content, names)


def run_around(path: Path) -> Path | None:
    """The folder of a run in which a file or folder lies, at most three levels up."""
    for folder in path.absolute().parents[:3]:
        if (folder / "config.toml").is_file() and (folder / "checkpoints").is_dir():
            here = Path.cwd()
            return folder.relative_to(here) if folder.is_relative_to(here) else folder
    return None
