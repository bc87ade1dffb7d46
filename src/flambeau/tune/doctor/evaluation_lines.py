"""Which lines of a script belong to its evaluations, by what they do: they read data without gradients."""

import functools
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from flambeau.tune.doctor.script_statements import lines_of, statements_of


def evaluation_lines(
    chains: Sequence[Sequence[Sequence[object]]], training: Sequence[Sequence[object]]
) -> Mapping[str, Collection[int]]:
    """Numbers of lines, by file: of the largest statements around an evaluation without a training step.

    Args:
        chains: lines, each file and number, that led to a loader without gradients, the outermost first.
        training: lines around a step of the optimizer, likewise.
    """
    trained: dict[str, set[int]] = defaultdict(set)
    for file, line, *_ in training:
        trained[str(file)].add(int(str(line)))
    found: dict[str, set[int]] = defaultdict(set)
    for chain in chains:
        for file, line, *_ in chain:
            lines = _statement(str(file), int(str(line)), frozenset(trained[str(file)]))
            if lines:
                found[str(file)].update(lines)
                break
    return found


@functools.cache
def _statement(file: str, line: int, without: frozenset[int]) -> range | None:
    """The lines of the largest statement that holds one line and none of the others."""
    ranges = map(lines_of, statements_of(file))
    return max((r for r in ranges if line in r and not without & set(r)), key=len, default=None)
