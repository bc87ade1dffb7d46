"""Which code of a folder may be run: code that this user made here, or trusts.

A run names files of code (`model = "net.py:build"`), and an export may hold a compiled library.
A folder from elsewhere may do so too, and a list of hashes in it proves nothing about its origin.
So whoever makes such a folder leaves a record outside of it: one small file in the user's state directory,
named by the SHA-256 of the content that names the code and of the paths of the files that it names.
A folder that was moved is still recognized; one that was changed, or was made elsewhere, is not.

Nothing here runs code; `Permission.ask` is called before each place that does.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flambeau.errors import InputError

CODE_FIELDS = ("data", "model", "builder")
"""The settings of a run that may be FILE.py:FUNCTION."""
TRUST = "trust=True"
"""The advice in a refusal; commands replace it by their flag."""
_OF_A_RUN = (
    "checkpoints",
    "dataset.json",
    "environment.json",
    "metrics.jsonl",
    "model.safetensors",
    "result.json",
)
"""A folder with one of these is a run, whole or with parts left out."""
RUNNING = "running "
"""The begin of the line that names the code which is run."""


class UntrustedCode(InputError):
    """A folder names or holds code, and nothing shows that its user made it or trusts it."""


def is_run(folder: Path) -> bool:
    """Whether a folder holds what a run writes."""
    names = (folder / name for name in _OF_A_RUN)
    return (folder / "config.toml").exists() and any(name.exists() for name in names)


def named_code(values: Mapping[str, object]) -> dict[str, str]:
    """The functions in files that the settings of a run name, by setting."""
    fields = {name: values.get(name) for name in CODE_FIELDS}
    return {name: text for name, text in fields.items() if isinstance(text, str) and ".py:" in text}


def code_file(name: str) -> Path:
    """The file of FILE.py:FUNCTION, absolute and without links."""
    return Path(name.rpartition(":")[0]).resolve()


def record(content: bytes, names: Iterable[str] = ()) -> bool:
    """Record, if possible, that this user has made something here."""
    folder = state_folder()
    if folder is None:
        return False
    files = sorted(str(code_file(name)) for name in names)
    target = folder / _key(content, files)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_private(folder):
            return False
        if target.is_file():
            return True
        # Its name says all; what is in it is for people, and may be cut off.
        text = "".join(f"{name}\n" for name in files)
        target.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError:
        return False
    return True


def is_recorded(content: bytes, names: Iterable[str] = ()) -> bool:
    """Whether `record` was called with the same arguments, by this user on this machine."""
    folder = state_folder()
    if folder is None:
        return False
    key = _key(content, sorted(str(code_file(name)) for name in names))
    with contextlib.suppress(OSError):
        return _is_private(folder) and (folder / key).is_file()
    return False


def state_folder() -> Path | None:
    """The folder of the records: flambeau/made in $XDG_STATE_HOME or ~/.local/state; None without a home."""
    given = os.environ.get("XDG_STATE_HOME", "")
    if Path(given).is_absolute():  # its specification says to ignore others
        return Path(given, "flambeau", "made")
    try:
        return Path.home() / ".local" / "state" / "flambeau" / "made"
    except RuntimeError:
        return None


def _key(content: bytes, files: Iterable[str]) -> str:
    digest = hashlib.sha256(hashlib.sha256(content).digest())
    for file in files:
        digest.update(os.fsencode(file) + b"\0")
    return digest.hexdigest()


def _is_private(folder: Path) -> bool:
    """Whether nobody else can leave a record there."""
    if os.name != "posix":
        return True
    status = folder.stat()
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022


@dataclass(frozen=True)
class Permission:
    """Whether the code that a folder names or holds may be run.

    Attributes:
        is_recorded: a record shows that this user made it here.
        hashes: SHA-256 by name of the folder's files then; a record covers no others.
    """

    folder: Path
    is_recorded: bool
    trust: bool
    say: Callable[[str], object] = lambda _: None
    hashes: Mapping[str, str] = field(default_factory=dict)

    def ask_for(self, values: Mapping[str, object], *fields: str) -> None:
        """`ask` for each function in a file that some settings of a run name."""
        for name, text in named_code(values).items():
            if name in fields:
                self.ask(text)

    def ask(self, what: str, *, why: str = "") -> None:
        """Say which code is run now, or refuse it by UntrustedCode: neither recorded nor trusted."""
        if not (self.is_recorded or self.trust):
            raise UntrustedCode(
                f"{self.folder} needs code to be run: {what}{why}\n"
                "Nothing here shows that you made this folder on this machine, so nothing of it was run. "
                f"Read that code; if you trust it: {TRUST}"
            )
        whose = "your own" if self.is_recorded else "trusted"
        line = f"{what}, which {self.folder} names ({whose})"
        # A name from a file must not reach the terminal as a command.
        self.say(RUNNING + "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line))

    def ask_for_file(
        self, path: Path, data: bytes, *, what: str | None = None, why: str = ""
    ) -> None:
        """`ask` for a file in the folder, whose content must be what the user made."""
        is_same = self.hashes.get(path.name) == hashlib.sha256(data).hexdigest()
        of_file = Permission(self.folder, self.is_recorded and is_same, self.trust, self.say)
        of_file.ask(what or str(path), why=why)


def ask_for_config(
    path: Path,
    values: Mapping[str, object],
    named: Iterable[str],
    *,
    trust: bool,
    say: Callable[[str], object],
) -> None:
    """`ask` for code in a run's file of settings, except `named` ones; of other files say which it is.

    Who names such a file, perhaps from elsewhere, permits it.
    """
    names = named_code(values)
    permission = Permission(path, is_recorded=False, trust=True, say=say)
    if any((path.parent / name).exists() for name in _OF_A_RUN):
        is_own_run = is_recorded(path.read_bytes(), names.values())
        permission = Permission(path.parent, is_own_run, trust, say)
    permission.ask_for(values, *(names.keys() - set(named)))


def made_now(folder: Path) -> Permission:
    """The permission for a folder that this process is making from the user's input."""
    return Permission(folder, is_recorded=False, trust=True)
