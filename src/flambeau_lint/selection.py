"""Which rules are on for which files: by settings, flags, the versions of libraries and whose file it is."""

import argparse
import difflib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from flambeau_lint.engine import choose
from flambeau_lint.files import own_libraries
from flambeau_lint.many_files import Job
from flambeau_lint.rule import Rule
from flambeau_lint.rules.catalog import RULES, is_selected, unknown
from flambeau_lint.settings import Settings, WrongUsage, settings_in, with_flags, words_of
from flambeau_lint.versions import installed_versions, is_before, parts_of, versions_for


class FolderSettings:
    """The settings of folders, with the flags: those of the next pyproject.toml above that has any.

    Each is read once; `notes` is what the user should know about them.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._known: dict[Path, Settings] = {}
        self.notes: dict[str, None] = {}

    def of(self, folder: Path) -> Settings:
        """Those of one folder.

        Raises:
            WrongUsage: if a flag or a setting cannot be.
        """
        if folder not in self._known:
            real = folder.resolve()
            if real not in self._known:
                self._known[real] = self._found(real)
            self._known[folder] = self._known[real]
        return self._known[folder]

    def _found(self, folder: Path) -> Settings:
        own = settings_in(folder)
        if own is None and folder != folder.parent:
            return self.of(folder.parent)
        settings, note = own or (Settings(), "")
        if note:
            self.notes[note] = None
        return _merged(settings, self._arguments)


def _merged(settings: Settings, arguments: argparse.Namespace) -> Settings:
    for name in ("target", "since"):
        value = getattr(arguments, name)
        if value and not parts_of(value):
            flag = {"target": "--target", "since": "--from"}[name]
            raise WrongUsage(f"{flag} {value}: must be a version of torch, such as 2.15")
    lists = ("select", "ignore", "extend_select", "exclude")
    flags: dict[str, Any] = {name: words_of(getattr(arguments, name) or ()) for name in lists}
    flags.update(target=arguments.target, since=arguments.since, preview=arguments.preview)
    merged = with_flags(settings, flags)
    per_file = [code for codes in merged.per_file_ignores.values() for code in codes]
    refuse_unknown([*merged.select, *merged.ignore, *merged.extend_select, *per_file])
    target = merged.target or installed_versions()["torch"]
    if merged.since and is_before(target, merged.since):
        raise WrongUsage(f"--from {merged.since} is newer than --target {target}")
    return merged


def refuse_unknown(words: Sequence[str]) -> None:
    """Words that select rules.

    Raises:
        WrongUsage: if one selects none.
    """
    for word in unknown(words):
        names = [name for rule in RULES for name in (rule.code, rule.name)]
        near = difflib.get_close_matches(word, names, 1)
        more = f"did you mean {near[0]}?" if near else "'rule all' shows all"
        raise WrongUsage(f"there is no rule {word!r}; {more}")


def jobs_for(files: Sequence[str], settings: Settings) -> list[Job]:
    """Each file with the codes of its rules."""
    versions = versions_for(settings.target) if settings.target else installed_versions()
    named = (*settings.select, *settings.extend_select)
    chosen = choose(RULES, versions, since=settings.since, preview=True)
    rules = [rule for rule in chosen if _is_on(rule, settings, named)]
    jobs = []
    for path in files:
        ignored = settings.ignored_in(Path(path)) if settings.per_file_ignores else ()
        own = own_libraries(path)
        codes = tuple(
            rule.code
            for rule in rules
            if not (ignored and is_selected(rule, ignored)) and not _is_its_own(rule, own)
        )
        jobs.append(Job(path, codes))
    return jobs


def _is_its_own(rule: Rule, own: Collection[str]) -> bool:
    """A library keeps and tests what it has deprecated; what is gone is gone there, too."""
    return rule.library in own and rule.kind in ("deprecated", "changed")


def _is_on(rule: Rule, settings: Settings, named: Sequence[str]) -> bool:
    """The longer word decides between --select and --ignore; a preview rule can be named."""
    selected = is_selected(rule, named)
    if rule.preview and not settings.preview and selected < len("FLB101"):
        return False
    return selected > is_selected(rule, settings.ignore)
