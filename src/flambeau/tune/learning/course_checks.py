"""Whether rates, decay, reductions, normalization and permutations fit the course of the loss."""

import math
import statistics
from collections.abc import Mapping
from typing import Any

from flambeau.tune.learning.finding import Finding, Seen, falls, notes_of, place

_FEW = 5  # times before anything is said; chosen
_DECAY = 0.01  # of the weights that decay removes in a step: half of them in 70 steps; chosen


def grows(losses: list[float]) -> bool:
    """Whether a loss ends far above its beginning, or is no number."""
    if len(losses) < _FEW:
        return False
    last = statistics.median(losses[-max(len(losses) // 4, 1) :])
    highest = max(losses[_FEW:], default=0.0)
    leaps = highest > 10 * abs(losses[0]) + 1 and not falls(losses)
    return not math.isfinite(last) or last > 2 * abs(losses[0]) + 1 or leaps


def _only_optimizer(seen: Seen) -> Mapping[str, Any] | None:
    stepping = [one for one in seen["optimizers"] if one["steps"] >= _FEW]
    return stepping[0] if len(stepping) == 1 and stepping[0]["name"] != "LBFGS" else None


def diverging(seen: Seen) -> list[Finding]:
    """The cause that is nearest to a loss that grows: a sum, parts that are added, or the rate."""
    one = _only_optimizer(seen)
    if one is None or not grows(seen["losses"]):
        return []
    losses = seen["losses"]
    course = f"the loss goes from {losses[0]:.3g} to {losses[-1]:.3g}"
    for note in notes_of(seen, "summed loss"):
        if note["first"]["n"] >= 8:
            text = f"the loss is the sum over {note['first']['n']} samples, and {course}"
            change = "use reduction='mean', or divide the rate by the number of samples"
            return [Finding("summed loss", "likely", text, change, place(note), harm=3)]
    parts = seen["backwards"] / max(one["steps"], 1)
    if parts >= 2:
        text = f"the gradients of {parts:.0f} backward passes are added for a step, and {course}"
        change = "divide each loss by the number of parts"
        line = place(seen["backward_line"])
        return [Finding("parts not divided", "likely", text, change, line, "FLB419", 3)]
    most = max(one["ratios"][:10], default=0.0)
    if most <= 1:
        return []
    rate = one["rates"][0] if one["rates"] else 0.0
    text = f"a step changed the weights by {most:.2g} of their length at a rate of {rate:.3g}, and {course}"
    return [Finding("rate too large", "likely", text, "lower lr", place(one["where"]), harm=3)]


def crawling(seen: Seen) -> list[Finding]:
    one = _only_optimizer(seen)
    if one is None or one["name"] != "SGD" or len(one["ratios"]) < 20 or falls(seen["losses"]):
        return []
    rates = one["rates"]
    middle = statistics.median(one["ratios"])
    if not 1e-5 <= middle < 2e-4 or rates[-1] > rates[0]:
        return []
    text = (
        f"a step changes the weights by {middle:.2g} of their length (median), at a rate of "
        f"{rates[0]:.3g}, and the loss does not fall"
    )
    return [Finding("rate too small", "likely", text, "raise lr", place(one["where"]))]


def decay(seen: Seen) -> list[Finding]:
    found = []
    for one in seen["optimizers"]:
        share = max(one.get("decays", [0.0]))
        if one["steps"] >= _FEW and share >= _DECAY:
            text = f"weight decay removes {share:.2g} of the weights in each step"
            change = "lower weight_decay: 0.0001 to 0.1 is usual"
            found.append(
                Finding("decay too large", "likely", text, change, place(one["where"]), harm=3)
            )
    return found


def normalization(seen: Seen) -> list[Finding]:
    found = []
    for note in notes_of(seen, "batch norm"):
        values, momentum = note["first"]["values"], note["first"]["momentum"]
        if note["count"] >= _FEW and max(values, note["last"]["values"]) <= 2:
            text = f"BatchNorm takes its statistics from {values} values per channel"
            change = "use larger batches, or GroupNorm or LayerNorm"
            found.append(Finding("tiny batches", "likely", text, change, place(note)))
        if momentum is not None and (momentum >= 0.95 or momentum < 0.002):
            what = "those of the last batch" if momentum >= 0.95 else "nearly those at the start"
            text = f"BatchNorm has momentum={momentum:g}: its statistics in evaluation are {what}"
            change = "torch's momentum is the share of the new batch: 0.1 is usual"
            found.append(Finding("stale statistics", "likely", text, change, place(note)))
    return found[:2]


def saturation(seen: Seen) -> list[Finding]:
    found = []
    for note in notes_of(seen, "saturation"):
        first = note["first"]["share"]
        share = note["last"]["share"]
        if note["count"] >= 2 * _FEW and first > 0.8 and share > 0.6 and note["last"]["width"] > 1:
            text = f"{share:.0%} of the outputs of {note['last']['name']} are at their ends"
            change = "start with smaller weights before it (torch.nn.init.xavier_uniform_)"
            found.append(Finding("saturated", "likely", text, change, place(note)))
    return found


def permutations(seen: Seen) -> list[Finding]:
    rows = notes_of(seen, "permutation")
    found = []
    for one in rows:
        for other in rows:
            is_next = one["file"] == other["file"] and 0 < other["line"] - one["line"] <= 3
            is_pair = one["first"] == other["first"] and one["count"] == other["count"]
            if is_next and is_pair and one["first"]["n"] > 16 and not falls(seen["losses"]):
                text = (
                    f"{one['first']['n']} samples were permuted twice, and the loss does not fall"
                )
                change = "make one permutation, and index inputs and labels by it"
                found.append(
                    Finding("permuted apart", "likely", text, change, place(other), harm=3)
                )
    return found


def modes(seen: Seen) -> list[Finding]:
    trained = {note["last"]["layer"] for note in notes_of(seen, "evaluation by name")}
    return [
        Finding(
            "train mode",
            "likely",
            f"{note['last']['layer']} was in train mode in {note['count']} calls of an evaluation",
            "call model.eval() before",
            place(note),
            "FLB443",
        )
        for note in notes_of(seen, "evaluation by name")
        if trained and seen["optimizer_steps"] >= _FEW
    ]


def signs(seen: Seen) -> list[Finding]:
    found = []
    for note in notes_of(seen, "sign of log-probabilities"):
        is_up = note["first"]["up"] and note["last"]["up"]
        losses = seen["losses"]
        if (
            is_up
            and note["count"] >= 2 * _FEW
            and losses
            and max(losses) <= 0
            and losses[-1] < losses[0]
        ):
            text = (
                f"the log-probability of the labels is minimized: from {losses[0]:.3g} "
                f"to {losses[-1]:.3g}"
            )
            change = "put a minus before it, or use cross_entropy"
            found.append(Finding("loss is maximized", "certain", text, change, place(note), harm=3))
    return found


CHECKS = (diverging, crawling, decay, normalization, saturation, permutations, modes, signs)
