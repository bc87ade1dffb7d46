"""metrics.jsonl: one JSON object per line; a resume cuts it back to its checkpoint."""

import json
import math
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flambeau.errors import naming
from flambeau.recipes.checkpoints.atomic_checkpoint import Disk


class MetricsLog:
    """Appends lines, each in one write, so a kill leaves at most a torn last line.

    What is beyond `keep_bytes`, the length at the checkpoint, is written again.
    """

    def __init__(self, path: Path, *, keep_bytes: int) -> None:
        self._fd = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o666
        )
        self._path = path
        self.missing_bytes = 0
        """By how much the file is shorter than at the checkpoint."""
        self.size = 0
        self.crc32 = 0  # of these bytes
        self.cut(keep_bytes)
        Disk().sync_folder(path.parent)  # the name of a new file must survive a power failure too

    def cut(self, keep_bytes: int) -> None:
        self.missing_bytes = max(0, keep_bytes - os.fstat(self._fd).st_size)
        if not self.missing_bytes:
            with naming(self._path):
                os.ftruncate(self._fd, keep_bytes)
        self.size = os.fstat(self._fd).st_size
        self.crc32 = crc32_of(self._path, self.size) or 0

    def write(self, row: Mapping[str, float | int | str | None]) -> None:
        """Append one line; NaN and infinity become null."""
        line = json.dumps(json_numbers(row)).encode() + b"\n"
        done = 0
        with naming(self._path):
            while done < len(line):
                done += os.write(self._fd, line[done:])
        self.size, self.crc32 = self.size + len(line), zlib.crc32(line, self.crc32)

    def sync(self) -> None:
        with naming(self._path):
            os.fsync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def crc32_of(path: Path, size: int) -> int | None:
    """CRC-32 of at most the first `size` bytes of metrics.jsonl; None if it cannot be read."""
    try:
        with path.open("rb") as file:
            return zlib.crc32(file.read(size))
    except OSError:
        return None


def json_numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with null for NaN and infinity, which JSON cannot express."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in row.items()
    }
