"""Reads the lines of metrics.jsonl for trackers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flambeau.run.trackers.tracker import START, Position

_CHUNK_BYTES = 2**16


def next_lines(path: Path, offset: int, size: int) -> list[tuple[int, dict[str, Any]]]:
    """The whole lines from an offset on, with their ends in the file, which may change meanwhile."""
    chunk = _CHUNK_BYTES
    with path.open("rb") as file:
        while True:
            file.seek(offset)
            text = file.read(min(chunk, size - offset))
            whole = text[: text.rfind(b"\n") + 1]
            if whole or len(text) < chunk:
                break
            chunk *= 2
    lines = []
    for line in whole.splitlines(keepends=True):
        offset += len(line)
        lines.append((offset, json.loads(line)))
    return lines


def position_after(path: Path, size: int) -> tuple[Position, int]:
    """The position after so many bytes, and the offset of the first line of its step."""
    lines = _first_lines(path, size)
    position = START
    start = sum(map(len, lines))
    for line in reversed(lines):
        step = json.loads(line)["step"]
        if position.lines and step != position.step:
            break
        position, start = Position(step, position.lines + 1), start - len(line)
    return position, start


def ends_with_evaluation(path: Path, size: int, *, step: int) -> bool:
    """Whether the last line of the first `size` bytes is of an evaluation at this step."""
    lines = _first_lines(path, size)
    row = json.loads(lines[-1]) if lines else {}
    return row.get("step") == step and "learning_rate" not in row


def _first_lines(path: Path, size: int) -> list[bytes]:
    with path.open("rb") as file:
        return file.read(size).splitlines(keepends=True)


def figures_of(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line except its step; those of a list as name/0, name/1 ..."""
    figures: dict[str, float] = {}
    for name, value in row.items():
        if name == "step":
            continue
        items = enumerate(value) if isinstance(value, list) else [(None, value)]
        for index, item in items:
            if isinstance(item, (int, float)):
                figures[name if index is None else f"{name}/{index}"] = item
    return figures
