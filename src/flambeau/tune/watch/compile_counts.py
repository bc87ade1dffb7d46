"""What torch.compile has made in a process so far: graphs, and why some of them had to end."""

import sys

import torch


def compile_counts() -> tuple[int, dict[str, int]]:
    """Graphs compiled so far, and how often one was broken, by reason (torch's, its first line).

    Nothing is imported for it: a process in which torch.compile was not used has (0, {}).
    """
    if "torch._dynamo" not in sys.modules:
        return 0, {}
    counters = torch._dynamo.utils.counters
    reasons: dict[str, int] = {}
    for reason, times in counters["graph_break"].items():
        line = reason.strip().partition("\n")[0]
        reasons[line] = reasons.get(line, 0) + times
    return counters["stats"]["unique_graphs"], reasons
