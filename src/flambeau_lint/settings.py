"""What is on: the table [tool.flambeau.lint] of pyproject.toml, and the flags that go before it."""

import difflib
import fnmatch
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any, Optional

from flambeau_lint.versions import parts_of


class WrongUsage(ValueError):
    """A flag or a setting that cannot be; the message says what to do."""


@dataclass(frozen=True)
class Settings:
    """One field per key of [tool.flambeau.lint]."""

    select: tuple[str, ...] = ("ALL",)
    ignore: tuple[str, ...] = ()
    extend_select: tuple[str, ...] = ()
    target: str = ""
    since: str = ""
    preview: bool = False
    exclude: tuple[str, ...] = ()
    per_file_ignores: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    root: str = ""  # the folder of pyproject.toml, from which globs count

    def ignored_in(self, path: PurePath) -> tuple[str, ...]:
        """The codes that `per-file-ignores` leaves out for a file."""
        return tuple(
            code
            for pattern, codes in self.per_file_ignores.items()
            if matches(path, pattern, self.root)
            for code in codes
        )


_KEYS = {
    "select": "select",
    "ignore": "ignore",
    "extend-select": "extend_select",
    "target": "target",
    "from": "since",
    "preview": "preview",
    "exclude": "exclude",
    "per-file-ignores": "per_file_ignores",
}


def matches(path: PurePath, pattern: str, root: str) -> bool:
    """Whether a glob fits the name of a file, its path, or one of its folders."""
    names = [path.as_posix(), path.name, *path.parts[:-1]]
    if root:
        try:
            inside = Path(path).resolve().relative_to(Path(root).resolve())
            names += [inside.as_posix(), *(parent.as_posix() for parent in inside.parents)]
        except ValueError:
            pass
    wanted = pattern.rstrip("/")
    return any(fnmatch.fnmatch(name, wanted) for name in names)


def settings_in(folder: Path) -> Optional[tuple[Settings, str]]:
    """The settings of the pyproject.toml of a folder, and what the user should know about them, else empty.

    None if it has no table [tool.flambeau.lint].

    Raises:
        WrongUsage: if a key or a value is wrong.
    """
    file = folder / "pyproject.toml"
    try:
        raw = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise WrongUsage(f"{file}: {error.strerror or error}") from None
    if b"flambeau" not in raw:
        return None
    if sys.version_info < (3, 11):
        if b"tool.flambeau" not in raw:
            return None
        version = ".".join(map(str, sys.version_info[:2]))
        return Settings(), f"{file} is not read: that needs Python 3.11, and this is {version}"
    table = _table(file, raw)
    return None if table is None else (settings_of(table, file), "")


def _table(file: Path, raw: bytes) -> Optional[dict[str, Any]]:
    """[tool.flambeau.lint]; None if there is none."""
    import tomllib

    try:
        table = tomllib.loads(raw.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise WrongUsage(f"{file}: {error}") from None
    for key in ("tool", "flambeau", "lint"):
        if key not in table:
            return None
        table = table[key]
        if not isinstance(table, dict):
            raise WrongUsage(f"{file}: {key} = {table!r}: must be a table")
    return table


def settings_of(table: Mapping[str, Any], file: Path) -> Settings:
    """The settings of a table.

    Raises:
        WrongUsage: if a key or a value is wrong.
    """
    fields: dict[str, Any] = {"root": str(file.parent)}
    for key, value in table.items():
        where = f"{file}: [tool.flambeau.lint] {key}"
        if key not in _KEYS:
            near = difflib.get_close_matches(key, _KEYS, 1)
            raise WrongUsage(
                f"{where}: there is no such key" + (f"; did you mean {near[0]}?" if near else "")
            )
        read = _READ.get(key, _words)
        try:
            fields[_KEYS[key]] = read(value)
        except ValueError:
            wanted = _WANTED.get(key, "a list of strings")
            raise WrongUsage(f"{where} = {value!r}: must be {wanted}") from None
    return Settings(**fields)


def _words(value: object) -> tuple[str, ...]:
    if isinstance(value, list) and all(isinstance(word, str) for word in value):
        return tuple(value)
    raise ValueError


def _table_of_words(value: object) -> dict[str, tuple[str, ...]]:
    if isinstance(value, dict):
        return {name: _words(codes) for name, codes in value.items()}
    raise ValueError


def _flag(value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise ValueError


def _version(value: object) -> str:
    if isinstance(value, str) and parts_of(value):
        return value
    raise ValueError


_READ: Mapping[str, Callable[[object], Any]] = {
    "per-file-ignores": _table_of_words,
    "preview": _flag,
    "target": _version,
    "from": _version,
}
_WANTED = {
    "per-file-ignores": "a table of globs and lists of codes",
    "preview": "true or false",
    "target": "a version as a string, such as '2.15'",
    "from": "a version as a string, such as '1.8'",
}


def with_flags(settings: Settings, flags: Mapping[str, Any]) -> Settings:
    """The settings with what the command line says."""
    given = {name: value for name, value in flags.items() if value}
    extended = (*settings.extend_select, *given.pop("extend_select", ()))
    return replace(settings, extend_select=extended, **given)


def words_of(texts: Sequence[str]) -> tuple[str, ...]:
    """`--select FLB1,FLB2 --select FLB301` as one list."""
    return tuple(word.strip() for text in texts for word in text.split(",") if word.strip())
