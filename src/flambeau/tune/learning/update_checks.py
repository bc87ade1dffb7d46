"""Whether gradients reach all parameters, are cleared, and move them by a useful length."""

import itertools
import math
from collections import defaultdict
from typing import Any

from flambeau.tune.learning.finding import Finding, Seen, notes_of, of_parameters, place
from flambeau.tune.watch.learning.loss_course import falls, grows, is_better

_FEW = 5  # steps before anything is said of all; chosen
_TOO_FAR = 0.3  # of the weights per step, median; Adam at a usual rate moves 0.001 to 0.03
_LEAP = 0.5  # of the weights in one of the first steps, where the loss grows; chosen
_TOO_NEAR = 1e-5
_TOO_NEAR_SGD = 2e-4  # where it is the only optimizer; chosen
_DECAY = 0.01  # of the weights that decay removes in a step: half of them in 70 steps; chosen
# Of notes: what was seen, what to change, lint rule.
_CLIPPING = {
    "clip of scaled gradients": (
        "gradients were clipped before GradScaler.unscale_",
        "call scaler.unscale_(optimizer) before clip_grad_norm_",
        "FLB405",
    ),
    "step with scaled gradients": (
        "steps were made with gradients that GradScaler had scaled",
        "call scaler.step(optimizer) in place of optimizer.step()",
        "",
    ),
    "clip before backward": (
        "gradients were clipped before backward had made those of the step",
        "clip between backward and step",
        "FLB435",
    ),
    "clip after step": (
        "gradients were clipped with no backward since the last step",
        "clip between backward and step",
        "FLB450",
    ),
}


def clearing(seen: Seen) -> list[Finding]:
    found = []
    for one in seen["optimizers"]:
        watched = one["watched"]
        if one["has_closure"] and one["closure_calls"] >= 10 and one["closure_clears"] <= 2:
            text = f"gradients of all {one['closure_calls']} calls of the closure add up"
            change = "call optimizer.zero_grad() in the closure, before backward"
            line = place(one["step_line"])
            found.append(Finding("no zero_grad", "certain", text, change, line, "FLB437", 3))
        if watched < _FEW or one["has_closure"]:
            continue
        if one["cleared"] <= 0.2 * watched:
            text = (
                f"gradients of all steps add up: cleared {one['cleared']} times in {watched} steps"
            )
            change = "call optimizer.zero_grad() in each step"
            line = place(one["step_line"])
            found.append(Finding("no zero_grad", "certain", text, change, line, "FLB437", 3))
        elif _is_cleared_too_soon(one):
            times = one["cleared_too_soon"]
            text = f"all gradients were cleared after backward, in {times} of {watched} steps"
            change = "call zero_grad before backward, or after step"
            line = place(one["zero_line"]) or place(one["step_line"])
            found.append(
                Finding("zero_grad before step", "certain", text, change, line, "FLB434", 3)
            )
    return found


def _is_cleared_too_soon(optimizer: Seen) -> bool:
    """Then nothing is known of gradients when it makes a step."""
    return bool(optimizer["cleared_too_soon"] > 0.8 * max(optimizer["watched"], 1))


def cleared_unused(seen: Seen) -> list[Finding]:
    """Several backward passes per step, from one line, of which only the last counts.

    An attack or a search for a perturbation clears what another line has computed.
    """
    found = []
    stepping = [one for one in seen["optimizers"] if one["steps"]]
    for one in stepping:
        times = one["cleared_unused"]
        is_usual = one["watched"] >= _FEW and times >= 0.9 * one["watched"]
        if is_usual and len(stepping) == 1 and not one["has_closure"]:
            text = (
                f"gradients were cleared {times} times before a step had used them, in "
                f"{one['watched']} steps: only the last part of each counts"
            )
            change = "call zero_grad once per step, before the first backward of its parts"
            line = place(one["zero_line"])
            found.append(Finding("cleared between parts", "likely", text, change, line))
    return found


def stepping(seen: Seen) -> list[Finding]:
    found = []
    for one in seen["optimizers"]:
        others = seen["optimizer_steps"]
        if not one["steps"] and one["has_gradients"] and seen["backwards"] >= 20:
            text = f"{one['name']} made no step, and backward ran {seen['backwards']} times"
            where = one["where"] if others else seen["backward_line"]
            change = "call its step() after backward"
            found.append(Finding("no step", "certain", text, change, place(where), harm=3))
    for note in notes_of(seen, "step without backward"):
        if note["count"] >= _FEW:
            text = f"{note['count']} steps were made with no backward since the step before"
            change = "call backward once before each step"
            found.append(Finding("step without backward", "likely", text, change, place(note)))
    return found


def rates(seen: Seen) -> list[Finding]:
    found = []
    for one in seen["optimizers"]:
        rates = one["rates"]
        ratios = sorted(one["ratios"])
        if len(rates) < _FEW:
            continue
        where = place(one["where"])
        most = max(rates)
        middle = ratios[len(ratios) // 2] if ratios else 0.0
        moved = f"a step changes the weights by {middle:.2g} of their length (median)"
        summed = notes_of(seen, "summed")
        if most == 0:
            text = f"the rate was 0 in all {len(rates)} steps"
            schedule = place(one["schedule_line"])
            rule = "FLB448" if schedule else ""
            where = schedule or where
            found.append(Finding("rate is zero", "certain", text, "set lr", where, rule, 3))
        elif len(rates) >= 20 and rates[-20] < 1e-3 * most:
            steps = next(i for i, rate in enumerate(rates) if rate < 1e-3 * most)
            text = f"the rate fell from {most:.3g} to {rates[-1]:.3g} within {steps + 1} steps"
            schedule = next((place(note) for note in notes_of(seen, "schedule")), where)
            change = "give the schedule its length in the unit in which you step it"
            found.append(Finding("schedule too short", "likely", text, change, schedule, harm=3))
        elif not ratios:
            continue
        elif middle > _TOO_FAR and not summed and not is_better(seen["losses"]):
            text = f"{moved}, at a rate of {rates[0]:.3g}, and the loss does not fall"
            change = f"lower lr{_tried(seen, is_lower=True)}"
            found.append(Finding("rate too large", "likely", text, change, where, harm=3))
        elif 0 < middle < _least(one, seen) and rates[-1] <= rates[0] and not falls(seen["losses"]):
            text = f"{moved}, at a rate of {rates[0]:.3g}, and the loss does not fall"
            change = f"raise lr{_tried(seen, is_lower=False)}"
            found.append(Finding("rate too small", "likely", text, change, where))
    return found


def _least(one: Seen, seen: Seen) -> float:
    """The shortest step, of the weights, that is not too short for an optimizer."""
    is_alone = sum(other["steps"] > 0 for other in seen["optimizers"]) == 1
    is_plain = one["name"] == "SGD" and len(one["ratios"]) >= 20
    return _TOO_NEAR_SGD if is_alone and is_plain else _TOO_NEAR


def _tried(seen: Seen, *, is_lower: bool) -> str:
    """What a lower or a higher rate made of one batch; '' if none was better."""
    rows = [one for one in seen["rates"] if (one["factor"] < 1 if is_lower else one["factor"] > 1)]
    rows = [one for one in rows if math.isfinite(one["last"])]
    best = min(rows, key=lambda one: float(one["last"]), default=None)
    if best is None or not best["last"] < 0.9 * best["first"]:
        return ""
    return (
        f": of one batch, lr={best['rate']:.3g} took the loss from {best['first']:.3g} to "
        f"{best['last']:.3g} in {best['steps']} steps"
    )


def by_heart(seen: Seen) -> list[Finding]:
    """Where the loss does not fall: whether that of a single batch does."""
    rows = [one for one in seen["by_heart"] if math.isfinite(one["last"])]
    if falls(seen["losses"]) or len(seen["losses"]) < 20 or not rows:
        return []
    best = min(rows, key=lambda one: one["last"])
    tried = (
        f"{best['steps']} steps of Adam (lr={best['rate']:g}) on one batch took it from "
        f"{best['first']:.3g} to {best['last']:.3g}"
    )
    where = place(seen["backward_line"])
    if best["last"] > 0.8 * best["first"]:
        text = f"the loss does not fall, and a batch cannot be learned by heart: {tried}"
        change = (
            "look at the inputs, the outputs, the labels and the scale of each: they may not fit"
        )
        return [Finding("batch not learned", "look", text, change, where)]
    if best["last"] < 0.5 * best["first"]:
        text = f"the loss does not fall, and {tried}: model and loss can learn"
        change = "look whether labels belong to their inputs, and at the rate"
        return [Finding("only by heart", "look", text, change, where)]
    return []


def diverging(seen: Seen) -> list[Finding]:
    """The cause that is nearest to a loss that grows: a sum, parts that are added, or the rate."""
    stepping = [one for one in seen["optimizers"] if one["steps"] >= _FEW]
    losses = seen["losses"]
    if len(stepping) != 1 or stepping[0]["name"] == "LBFGS" or not grows(losses):
        return []
    one = stepping[0]
    course = f"the loss goes from {losses[0]:.3g} to {losses[-1]:.3g}"
    for note in notes_of(seen, "summed"):
        if note["first"]["samples"] >= 8:
            text = f"the loss is the sum over {note['first']['samples']} samples, and {course}"
            change = "use reduction='mean', or divide the rate by the number of samples"
            return [Finding("summed loss", "likely", text, change, place(note), harm=3)]
    parts = one["backwards_used"] / max(one["steps"], 1)
    if parts >= 2:
        text = f"the gradients of {parts:.0f} backward passes are added for a step, and {course}"
        change = "divide each loss by the number of parts"
        line = place(seen["backward_line"])
        return [Finding("parts not divided", "likely", text, change, line, "FLB419", 3)]
    most = max(one["ratios"][:10], default=0.0)
    if most <= _LEAP:
        return []
    text = (
        f"a step changed the weights by {most:.2g} of their length at a rate of "
        f"{one['rates'][0]:.3g}, and {course}"
    )
    change = f"lower lr{_tried(seen, is_lower=True)}"
    return [Finding("rate too large", "likely", text, change, place(one["where"]), harm=3)]


def decay(seen: Seen) -> list[Finding]:
    found = []
    for one in seen["optimizers"]:
        if one["steps"] >= _FEW and one["decay"] >= _DECAY:
            text = f"weight decay removes {one['decay']:.2g} of the weights in each step"
            change = "lower weight_decay: 0.0001 to 0.1 is usual"
            where = place(one["where"])
            found.append(Finding("decay too large", "likely", text, change, where, harm=3))
    return found


def accumulating(seen: Seen) -> list[Finding]:
    """Several whole losses add up to one step, from one line, where each is a mean."""
    notes = notes_of(seen, "whole loss")
    optimizers = [one for one in seen["optimizers"] if one["steps"]]
    if len(notes) != 1 or len(optimizers) != 1 or optimizers[0]["name"] == "LBFGS":
        return []
    steps = seen["optimizer_steps"]
    count = optimizers[0]["backwards_used"]
    if steps < _FEW or count < 1.9 * steps or optimizers[0]["cleared"] < optimizers[0]["watched"]:
        return []
    parts = round(count / steps)
    text = f"{parts} backward passes of a mean each add up to one step: gradients are {parts} times as long"
    change = f"divide the loss by {parts}"
    sure = "look" if falls(seen["losses"]) else "likely"
    return [Finding("sum of losses", sure, text, change, place(notes[0]), "FLB419", 1)]


def left_over(seen: Seen) -> list[Finding]:
    return [
        Finding(
            "gradients of two losses",
            "likely",
            f"in {note['count']} calls backward added to gradients of another loss, which the step of "
            "another optimizer had used and left",
            "call zero_grad of this optimizer before backward, or detach what the other loss reads",
            place(note),
        )
        for note in notes_of(seen, "gradients of two losses")
        if note["count"] >= _FEW
    ]


def listed_twice(seen: Seen) -> list[Finding]:
    return [
        Finding(
            "listed twice",
            "certain",
            f"{of_parameters(one['listed_twice'])} stand twice in {one['name']}: each step moves them twice",
            "give each parameter to the optimizer once",
            place(one["where"]),
        )
        for one in seen["optimizers"]
        if one["listed_twice"] and one["steps"]
    ]


def twice_owned(seen: Seen) -> list[Finding]:
    rows = [row for row in seen["parameters"] if row["optimizers"] > 1]
    stepped = sorted(
        (one for one in seen["optimizers"] if one["steps"]), key=lambda one: int(one["first_step"])
    )
    # One that begins after the other has ended is of a later stage, as in fine-tuning.
    is_at_once = any(
        after["first_step"] < before["last_step"] for before, after in itertools.pairwise(stepped)
    )
    if not rows or not is_at_once:
        return []
    text = f"{of_parameters(len(rows))} are in {rows[0]['optimizers']} optimizers that make steps"
    change = "give each parameter to one optimizer"
    where = place(stepped[-1]["where"])
    return [Finding("in two optimizers", "likely", text, change, where)]


def parameters(seen: Seen) -> list[Finding]:
    if not any(one["steps"] >= _FEW for one in seen["optimizers"]):
        return []
    if any(_is_cleared_too_soon(one) for one in seen["optimizers"]):
        return []
    rows = seen["parameters"]
    models: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        models[row["model"]].append(row)
    no_gradient = [
        row for row in rows if row["optimizer"] and row["requires_grad"] and not row["has_grad"]
    ]
    found = _detached([row for row in no_gradient if row["model"] and row["ran"]], seen)
    found += _frozen(rows)
    found += [] if falls(seen["losses"]) else _frozen_at_the_end(rows)
    found += _unregistered([row for row in rows if not row["is_registered"]], seen)
    elsewhere = [row for row in no_gradient if not row["model"]]
    for model, some in models.items():
        left_out = [
            row
            for row in some
            if row["is_registered"]
            and row["requires_grad"]
            and row["has_grad"]
            and row["optimizer"] is None
        ]
        has_owned = any(row["optimizer"] for row in some)
        if model and left_out and (has_owned or elsewhere):
            found.append(_left_out(left_out, some, elsewhere, seen))
    return found


def _frozen(rows: list[dict[str, Any]]) -> list[Finding]:
    """Parameters that were given to an optimizer before they were frozen."""
    some = [row for row in rows if row["optimizer"] and row["ran"] and place(row["frozen"])]
    some = [row for row in some if not row["requires_grad"]]
    if not some:
        return []
    names = ", ".join(row["name"] or "a parameter without a name" for row in some[:3])
    text = f"{of_parameters(len(some))} in the optimizer are frozen since this line: {names}"
    change = "set requires_grad = True again, or give the optimizer only what is trained"
    return [Finding("frozen", "look", text, change, place(some[0]["frozen"]))]


def _frozen_at_the_end(rows: list[dict[str, Any]]) -> list[Finding]:
    """The layer that gives the outputs stays as it is, and some before it are trained."""
    last = [row for row in rows if row["is_last"] and place(row["frozen"])]
    last = [row for row in last if not row["requires_grad"]]
    models = {row["model"] for row in rows if row["optimizer"] and row["has_grad"]}
    last = [row for row in last if row["model"] in models and not row["optimizer"]]
    if not last:
        return []
    names = ", ".join(row["name"] for row in last[:3])
    text = f"the last layer is frozen since this line ({names}), and the loss does not fall"
    change = "train it, too, unless its weights are those of a trained model"
    return [Finding("frozen", "look", text, change, place(last[0]["frozen"]))]


def _left_out(
    rows: list[dict[str, Any]],
    model: list[dict[str, Any]],
    elsewhere: list[dict[str, Any]],
    seen: Seen,
) -> Finding:
    owners = [row["optimizer"] for row in [*elsewhere, *model] if row["optimizer"]]
    where = owners[0] if owners else seen["backward_line"]
    names = ", ".join(row["name"] for row in rows[:3])
    more = f"{names}{' ...' if len(rows) > 3 else ''}"
    text = f"{of_parameters(len(rows))} of {len(model)} have gradients and no optimizer: {more}"
    if elsewhere:
        text += f"; the optimizer has {of_parameters(len(elsewhere))} that the model does not use"
    change = "make the optimizer after the model is complete, with all of its parameters"
    return Finding("not in the optimizer", "certain", text, change, place(where), "FLB453", 3)


def _detached(rows: list[dict[str, Any]], seen: Seen) -> list[Finding]:
    if not rows:
        return []
    names = ", ".join(row["name"] for row in rows[:3])
    text = (
        f"{of_parameters(len(rows))} ran, are in the optimizer and never got a gradient: "
        f"{names}{' ...' if len(rows) > 3 else ''}"
    )
    change = "look for detach, .data, no_grad, argmax or NumPy between them and the loss"
    cuts = notes_of(seen, "cut")
    where = place(rows[0]["without_gradients"]) or place(rows[0]["run"])
    if not place(rows[0]["without_gradients"]) and cuts:
        where = place(cuts[-1])
    return [Finding("detached", "certain", text, change, where, harm=3)]


def _unregistered(rows: list[dict[str, Any]], seen: Seen) -> list[Finding]:
    rows = [row for row in rows if row["optimizer"] is None]
    if not rows:
        return []
    names = ", ".join(dict.fromkeys(row["name"].partition(".")[0] for row in rows))
    text = f"layers ({names}) run inside the model and are none of its modules: nobody trains them"
    owners = [one["where"] for one in seen["optimizers"] if place(one["where"])]
    where = place(owners[0] if owners else rows[0]["where"])
    change = "keep them as attributes of the module, in nn.ModuleList or nn.ModuleDict"
    return [Finding("not registered", "certain", text, change, where, "FLB408", 3)]


def _origin(rows: list[dict[str, Any]]) -> str:
    return place(rows[0]["made"]) or place(rows[0]["where"])


def _set_bias(weight: dict[str, Any], seen: Seen) -> str:
    """The line that sets the bias of the same layer, where that is not the line that made the layer."""
    name = f"{weight['name'].rpartition('.')[0]}.bias".removeprefix(".")
    rows = [row for row in seen["parameters"] if row["name"] == name]
    rows = [
        row for row in rows if row["model"] == weight["model"] and row["made"] != weight["made"]
    ]
    return place(rows[0]["made"]) if rows else ""


def saturated(seen: Seen) -> list[Finding]:
    notes = [note for note in notes_of(seen, "saturated") if note["count"] >= 20]
    return [
        Finding(
            "saturated",
            "likely",
            f"{note['first']['share']:.0%} of the outputs of {note['first']['what']} have hardly a slope",
            "start with smaller weights, or scale the inputs",
            place(note),
        )
        for note in notes[:1]
        if note["first"]["share"] > 0.85
    ]


def dead(seen: Seen) -> list[Finding]:
    rows = [row for row in seen["parameters"] if row["ndim"] > 1 and row["watched"] >= 10]
    still = [row for row in rows if row["has_grad"] and not row["with_value"] and row["ran"]]
    found = []
    if still:
        names = ", ".join(row["name"] for row in still[:3])
        text = f"the gradient of {of_parameters(len(still))} was exactly 0 in all steps: {names}"
        change = "look for dead ReLUs, weights of zero and outputs without an effect"
        where = _set_bias(still[0], seen) or _origin(still)
        found.append(Finding("dead", "likely", text, change, where))
    equal = [row for row in rows if row["equal_rows"] and row["with_value"]]
    if equal:
        names = ", ".join(row["name"] for row in equal[:3])
        text = f"all units of {names} are still equal after {equal[0]['watched']} steps"
        change = "start weights from random numbers (torch.nn.init)"
        found.append(Finding("equal units", "certain", text, change, _origin(equal)))
    silent = [one for one in seen["relus"] if len(one) >= 10 and max(one[len(one) // 2 :]) == 0]
    if silent and not still:
        text = f"{len(silent)} ReLU layers gave only zeros in the second half of the steps"
        change = "lower the rate, or start with smaller weights"
        found.append(Finding("dead", "likely", text, change, place(seen["input_line"]), harm=3))
    return found


def clipping(seen: Seen) -> list[Finding]:
    found = []
    for kind, (text, change, rule) in _CLIPPING.items():
        for note in notes_of(seen, kind):
            if note["count"] >= _FEW:
                whole = f"{text}, {note['count']} times"
                found.append(Finding(kind, "certain", whole, change, place(note), rule))
    for note in notes_of(seen, "clipped"):
        least = min(note["first"]["ratio"], note["last"]["ratio"])
        if least > 1000 and note["count"] >= _FEW and not falls(seen["losses"]):
            text = f"gradients are {least:.3g} times as long as max_norm={note['last']['most']:g}"
            change = "raise max_norm"
            found.append(Finding("clipped to nothing", "likely", text, change, place(note)))
    return found


def schedules(seen: Seen) -> list[Finding]:
    return [
        Finding(
            "schedule before optimizer",
            "certain",
            "the first step of the schedule came before the first of its optimizer",
            "call scheduler.step() after optimizer.step()",
            place(note),
            "FLB420",
            1,
        )
        for note in notes_of(seen, "schedule")
        if note["first"]["first"]
    ]


CHECKS = (
    clearing,
    cleared_unused,
    stepping,
    diverging,
    rates,
    decay,
    accumulating,
    twice_owned,
    listed_twice,
    left_over,
    parameters,
    dead,
    saturated,
    clipping,
    schedules,
)
