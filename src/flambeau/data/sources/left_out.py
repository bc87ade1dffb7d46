"""Files and columns beside images that are not read, counted so that nothing is left out silently."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from flambeau.data.sources.index_cache import INDEX_SUFFIX
from flambeau.file_signature import signature

_SHOWN = 5  # endings in a message


@dataclass
class LeftOut:
    """Counts of unread files by ending, or the unread columns of a table.

    `first` has a file of each ending, if it can be looked at.
    """

    where: str
    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, Path] = field(default_factory=dict)
    columns: tuple[str, ...] = ()

    def add(self, ending: str, path: Path | None = None) -> None:
        if ending == INDEX_SUFFIX:  # written by flambeau itself
            return
        self.counts[ending] += 1
        if path is not None:
            self.first.setdefault(ending, path)

    @property
    def endings(self) -> str:
        """The most frequent endings, their counts, and what the first of each is, if known."""
        shown = sorted(self.counts.items(), key=lambda item: (-item[1], item[0]))[:_SHOWN]
        texts = [
            f"{count:,} {ending or 'without ending'}{self._what(ending)}" for ending, count in shown
        ]
        more = sum(self.counts.values()) - sum(count for _, count in shown)
        return ", ".join([*texts, *([f"{more:,} others"] if more else [])])

    @property
    def lines(self) -> list[str]:
        """What to say of it; empty if there is nothing."""
        lines = [self.line] if self.counts else []
        if self.columns:
            names = ", ".join(name or "without name" for name in self.columns[:_SHOWN])
            more = len(self.columns) - _SHOWN
            listed = f"{names}, {more} others" if more > 0 else names
            lines.append(f"{self.where}: columns that are not read: {listed}")
        return lines

    @property
    def line(self) -> str:
        count = sum(self.counts.values())
        files = "1 file is" if count == 1 else f"{count:,} files are"
        return f"{self.where}: {files} left out, by ending: {self.endings}"

    def _what(self, ending: str) -> str:
        path = self.first.get(ending)
        if path is None:
            return ""
        try:
            kind = signature(path)
        except OSError:
            return ""
        return f" (such as {kind.what})" if kind is not None and kind.is_image else ""
