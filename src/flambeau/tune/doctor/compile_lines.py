"""What a script's torch.compile has made, in words."""

from typing import Any


def compiled_anew(trainer: dict[str, Any]) -> str:
    """' (3 graphs in 20 steps)': what was compiled while the steps were timed; '' for nothing."""
    graphs = trainer.get("graphs_in_window", 0)
    if not graphs:
        return ""
    return f" ({graphs} graph{'s' * (graphs > 1)} in {trainer['steps']} steps)"


def graph_breaks_line(trainer: dict[str, Any]) -> str:
    """A sentence: how often torch.compile had to end a graph, and why most often; '' where it never had to.

    What that costs shows only in a trial without torch.compile, so it is no cause with a share.
    """
    breaks = trainer.get("graph_breaks", {})
    if not breaks:
        return ""
    most = max(breaks, key=lambda reason: breaks[reason])
    return (
        f"torch.compile has made {trainer['graphs']} graphs; graph breaks: {sum(breaks.values())}, most "
        f"often for: {most} (TORCH_LOGS=graph_breaks says where)."
    )
