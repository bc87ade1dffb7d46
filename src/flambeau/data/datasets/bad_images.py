"""The list of images that could not be read, kept in the folder of the run."""

from collections.abc import Callable, Sequence
from pathlib import Path

from flambeau.errors import InputError


class BadImages:
    """Counts distinct bad images, and lists each on a line of `path`, if any."""

    def __init__(self, path: Path | None, *, limit: int) -> None:
        self._path, self._limit = path, limit
        self.names: dict[str, None] = {}  # a set in the order of insertion

    def report_to(self, describe: Callable[[int], str]) -> Callable[[Sequence[int]], None]:
        """A function of a data set's bad indices; InputError beyond the limit."""

        def report(indices: Sequence[int]) -> None:
            if not self.names and self._path is not None and self._path.exists():
                self.names = dict.fromkeys(self._path.read_text(encoding="utf-8").splitlines())
            for name in map(describe, indices):
                if name not in self.names:
                    self._add(name)

        return report

    def _add(self, name: str) -> None:
        if len(self.names) >= self._limit:
            known = ", ".join(list(self.names)[:3]) + (" ..." if len(self.names) > 3 else "")
            raise InputError(
                f"{name} cannot be read, and --skip-bad-images {self._limit} is used up: {known}\n"
                "Repair or remove them, or raise --skip-bad-images."
            )
        self.names[name] = None
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as lines:
                lines.write(name + "\n")
