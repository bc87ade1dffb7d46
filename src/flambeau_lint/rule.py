"""What a rule is, and what it finds."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Callable, Optional

from flambeau_lint.versions import is_before

if TYPE_CHECKING:
    from flambeau_lint.program import Program

KINDS = {
    1: "removed",
    2: "deprecated",
    3: "changed",
    4: "wrong",
    5: "unsafe",
    6: "slow",
}
"""The first digit of a code."""


@dataclass(frozen=True)
class Edit:
    """Bytes of the source to replace, from `start` to before `end`."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Fix:
    """Edits that belong together: all of them are made, or none."""

    edits: tuple[Edit, ...]
    is_safe: bool = True


@dataclass(frozen=True)
class Finding:
    """One place that a rule speaks of; offsets are bytes of the source."""

    code: str
    start: int
    end: int
    message: str
    fix: Optional[Fix] = None


Check = Callable[["Program", "Rule", ast.AST], Iterator[Finding]]


@dataclass(frozen=True)
class Rule:
    """One fact about a library, with the versions in which it holds.

    `deprecated`, `removed` and `changed` name the first version of each: from the first of them on, and
    before `until`, the rule reports. A rule with `changed` alone reports only with `--from` an older version.
    """

    code: str
    name: str
    en: str
    zh: str
    bad: str
    good: str
    why: str = ""
    library: str = "torch"
    deprecated: str = ""
    removed: str = ""
    changed: str = ""
    until: str = ""
    use: str = ""  # what is written instead
    fix: str = "none"  # 'safe', 'unsafe'
    runs: str = (
        "silent"  # what the bad example does: an error or a warning by its class, or 'silent'
    )
    sure: str = "certain"
    preview: bool = False
    names: tuple[str, ...] = ()  # dotted; each use is handed to `check`
    calls: tuple[str, ...] = ()  # dotted; each call is
    attributes: tuple[str, ...] = ()  # of anything; each `.name` is
    whole: bool = False  # the tree is, once
    check: Optional[Check] = None

    @property
    def kind(self) -> str:
        return KINDS[int(self.code[3])]

    @property
    def is_journey(self) -> bool:
        """Whether it only matters to who comes from an older version."""
        return bool(self.changed) and not (self.deprecated or self.removed)

    def holds(self, version: str, since: str = "") -> bool:
        """Whether it is true of a version of its library.

        Args:
            version: of the library, for which the file is read.
            since: the version that the file was written for; empty if that was not said.
        """
        if self.until and not is_before(version, self.until):
            return False
        if self.is_journey:
            is_on_way = bool(since) and is_before(since, self.changed)
            return is_on_way and not is_before(version, self.changed)
        first = min_version(self.deprecated, self.removed)
        return not first or not is_before(version, first)


def min_version(*versions: str) -> str:
    """The oldest of those that are given; empty if none is."""
    given = [version for version in versions if version]
    oldest = given[0] if given else ""
    for version in given:
        if is_before(version, oldest):
            oldest = version
    return oldest
