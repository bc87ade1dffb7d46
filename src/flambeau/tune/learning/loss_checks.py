"""Whether labels, outputs and the loss fit each other."""

from typing import Any

from flambeau.tune.learning.finding import Finding, Seen, notes_of, place
from flambeau.tune.watch.learning.loss_course import falls

# Of notes that need no further figures: kind, how sure, text, what to change, lint rule, harm.
_PLAIN: tuple[tuple[str, str, str, str, str, int], ...] = (
    (
        "softmax before cross_entropy",
        "certain",
        "in {count} calls cross_entropy got probabilities: each row of {classes} sums to 1",
        "give cross_entropy the outputs of the last layer, without softmax",
        "FLB404",
        3,
    ),
    (
        "activation before cross_entropy",
        "likely",
        "in {count} calls cross_entropy got the outputs of {what}, which limits the logits",
        "give cross_entropy the outputs of the last linear layer",
        "",
        2,
    ),
    (
        "sigmoid before logits",
        "certain",
        "in {count} calls binary_cross_entropy_with_logits got the outputs of {what}",
        "leave it out: this loss takes logits",
        "FLB431",
        3,
    ),
    (
        "softmax before nll_loss",
        "certain",
        "in {count} calls nll_loss got probabilities, of which it takes no logarithms",
        "write log_softmax in place of softmax, or use cross_entropy without it",
        "FLB433",
        3,
    ),
    (
        "nll of no logarithms",
        "certain",
        "in {count} calls nll_loss got values above 0, which are no logarithms of probabilities",
        "use cross_entropy on the outputs, or log_softmax before nll_loss",
        "FLB457",
        3,
    ),
    (
        "kl_div of probabilities",
        "certain",
        "in {count} calls kl_div got probabilities as its input",
        "give it log_softmax of the outputs",
        "",
        3,
    ),
    (
        "binary labels out of range",
        "certain",
        "the labels of a binary cross-entropy reach from {low:g} to {high:g}",
        "make them 0 and 1",
        "",
        3,
    ),
    (
        "labels do not sum to one",
        "likely",
        "cross_entropy got several labels per sample: they sum to {mean:.3g} in the mean",
        "use binary_cross_entropy_with_logits where several labels are right",
        "",
        2,
    ),
    (
        "labels are the inputs",
        "likely",
        "in {count} calls each label is the number that the model has read at the same place",
        "shift: predict tokens[:, 1:] from tokens[:, :-1]",
        "",
        3,
    ),
    (
        "clamp in place of sigmoid",
        "likely",
        "in {count} calls binary_cross_entropy got clamped outputs, which have no gradient outside",
        "use binary_cross_entropy_with_logits on the outputs",
        "",
        3,
    ),
    (
        "shapes broadcast",
        "certain",
        "{loss} of shapes {input} and {target}: each output meets the label of every sample",
        "give both the same shape, as by output.squeeze(1)",
        "",
        3,
    ),
    (
        "loss is detached",
        "certain",
        "in {count} calls backward began at a tensor that no parameter has a part in",
        "call backward on the loss itself, not on a copy by .item(), .data or torch.tensor",
        "",
        3,
    ),
    (
        "softmax of one",
        "certain",
        "softmax over a dimension of size 1, of shape {shape}: the result is always 1",
        "take sigmoid, or the dimension of the classes",
        "",
        3,
    ),
    (
        "softmax over batch",
        "likely",
        "softmax over the samples of the batch, of shape {shape}",
        "take dim=1, the classes",
        "",
        3,
    ),
    (
        "log_softmax before cross_entropy",
        "look",
        "in {count} calls cross_entropy got log-probabilities, of which it takes log_softmax again",
        "leave log_softmax out, or use nll_loss: the value is the same",
        "",
        1,
    ),
    (
        "padding in the loss",
        "likely",
        "in {count} calls the end of each sequence, all of label {label}, was part of the loss: "
        "{share:.0%} of the labels",
        "leave padding out: cross_entropy(..., ignore_index={label}), if no real label has this number",
        "",
        2,
    ),
    (
        "channels mixed",
        "likely",
        "in {count} calls outputs of shape {old} were reshaped to {new}, which mixes channels and places",
        "move channels to the end first: outputs.movedim(1, -1).reshape(-1, channels)",
        "",
        3,
    ),
    (
        "argmax over samples",
        "likely",
        "in {count} calls one-hot labels of shape {shape} went through argmax over the samples",
        "take argmax(1), which gives the class of each sample",
        "",
        3,
    ),
    (
        "average of itself",
        "certain",
        "in {count} calls lerp_ averaged a tensor with itself, which changes nothing",
        "keep a copy of the weights in the average: parameter.detach().clone()",
        "",
        1,
    ),
    (
        "losses add up",
        "likely",
        "in {count} steps backward began at a sum that holds the losses of earlier steps",
        "call backward on the loss of the step, and add loss.item() to a running sum",
        "",
        2,
    ),
    (
        "dropout in evaluation",
        "certain",
        "dropout with p={p:g} was active in {count} calls while the model was in eval mode",
        "write F.dropout(x, p, training=self.training)",
        "FLB409",
        2,
    ),
)


def plain_notes(seen: Seen) -> list[Finding]:
    return [
        Finding(
            kind,
            sure,
            text.format(count=note["count"], **note["last"]),
            change.format(**note["last"]),
            place(note),
            rule,
            harm,
        )
        for kind, sure, text, change, rule, harm in _PLAIN
        for note in notes_of(seen, kind)
    ]


def empty(seen: Seen) -> list[Finding]:
    """Losses that cannot teach anything: always 0, or of targets that are all equal."""
    found = []
    steps = max(seen["backwards"], 1)
    for note in notes_of(seen, "loss is zero"):
        if note["count"] >= 10 and note["count"] >= 0.9 * min(steps, 40):
            text = f"the loss was exactly 0 in {note['count']} steps"
            change = "look for a weight of 0, such as a division of whole numbers"
            found.append(Finding("loss is zero", "certain", text, change, place(note), harm=3))
    for note in notes_of(seen, "equal targets"):
        if note["count"] >= 20 and note["first"] == note["last"] and len(seen["optimizers"]) == 1:
            text = (
                f"all targets were {note['last']['value']:g} in {note['count']} calls of the loss"
            )
            change = (
                "look at the targets before the loss: a cast to whole numbers, or a wrong column"
            )
            found.append(Finding("equal targets", "likely", text, change, place(note), harm=3))
    for note in notes_of(seen, "equal samples"):
        if note["count"] >= 10 and note["count"] >= 0.9 * min(steps, 40):
            text = (
                f"all {note['last']['samples']} samples of a batch were equal and their labels were "
                f"not, in {note['count']} calls of the loss"
            )
            change = "look whether one buffer is returned for each sample: return a copy"
            found.append(Finding("equal samples", "certain", text, change, place(note), harm=3))
    return found


def not_finite(seen: Seen) -> list[Finding]:
    found = []
    for kind, what in (("loss is not finite", "the loss"), ("gradients not finite", "gradients")):
        for note in notes_of(seen, kind)[:1]:
            found.append(
                Finding(
                    kind,
                    "certain",
                    f"{what} became inf or nan, {note['count']} times in {seen['backwards']} steps",
                    "lower the rate, clip gradients, or look for log(0), a division by 0 and "
                    "inputs that are nan",
                    place(note),
                    harm=3,
                )
            )
    return found[:1]


def goes_up(seen: Seen) -> list[Finding]:
    if len(seen["optimizers"]) != 1:
        return []
    optimizer = seen["optimizers"][0]
    negated = notes_of(seen, "loss is negated")
    change = "minimize the loss itself"
    found = [
        Finding(
            "loss is maximized",
            "certain",
            f"backward began at {note['last']['loss']:.4g}: {note['last']['name']} with a minus",
            change,
            place(note),
            harm=3,
        )
        for note in negated
        if note["count"] > 2
    ]
    if optimizer["maximize"] and optimizer["steps"] and not negated and notes_of(seen, "value"):
        text = f"{optimizer['name']} has maximize=True and follows a loss upwards"
        found.append(
            Finding("loss is maximized", "certain", text, change, place(optimizer["where"]), harm=3)
        )
    return found


def labels(seen: Seen) -> list[Finding]:
    found = _absent(seen)
    for row in seen["classes"]:
        counts = row["counts"]
        total = sum(counts)
        others = counts[1:]
        if not counts[0] and min(others) > 0 and total >= 20 * len(counts) and len(counts) > 2:
            text = f"class 0 of {len(counts)} never came in {total} labels, and all others did"
            change = "count labels from 0, and give the model as many outputs as there are classes"
            found.append(Finding("labels off by one", "likely", text, change, place(row["where"])))
        is_shifted = (
            not counts[-1] and min(counts[:-1]) > 0 and row["below"] > 0.3 * min(counts[:-1])
        )
        if is_shifted and total >= 20 * len(counts) and len(counts) > 2:
            text = f"{row['below']} labels are -1, which the loss ignores, and the last class never came"
            change = "count labels from 0: 1 was taken from labels that did so already"
            found.append(Finding("labels off by one", "likely", text, change, place(row["where"])))
    again, changed = seen["labels"]
    if again >= 30 and changed > 0.3 * again:
        text = f"{changed} of {again} samples that came again had another label"
        change = "keep inputs and labels in the same order: shuffle both by one permutation"
        where = place(seen["classes"][0]["where"]) if seen["classes"] else ""
        found.append(Finding("labels are shuffled", "certain", text, change, where, harm=3))
    return found


def _absent(seen: Seen) -> list[Finding]:
    """Outputs for classes that no sample has."""
    found = []
    for row in seen["classes"]:
        counts = row["counts"]
        used = max((one + 1 for one, count in enumerate(counts) if count), default=0)
        is_dense = all(counts[:used]) and 2 <= used <= 0.7 * len(counts)
        if is_dense and sum(counts) >= 20 * len(counts):
            text = f"{sum(counts)} labels reach from 0 to {used - 1}, and there are {len(counts)} outputs"
            change = (
                "give the model an output per class, or look whether labels were wrapped or lost"
            )
            found.append(Finding("classes never come", "look", text, change, place(row["where"])))
    return found


def weakened(seen: Seen) -> list[Finding]:
    """What a script may do on purpose, and seldom does."""
    found = []
    for note in notes_of(seen, "times zero"):
        if note["count"] >= 20 and note["count"] >= 0.9 * min(seen["backwards"], 40):
            text = f"a part of the loss was multiplied by 0, {note['count']} times"
            change = "leave the part out, or look for a division of whole numbers"
            found.append(Finding("part times zero", "look", text, change, place(note)))
    for note in notes_of(seen, "average hardly moves"):
        if note["count"] >= 10:
            share = note["last"]["share"]
            text = (
                f"an average moves by {share:.2g} per call: half of the way takes {0.7 / share:.0f}"
            )
            change = "use a decay such as 0.999, or one that grows with the steps"
            found.append(Finding("average hardly moves", "look", text, change, place(note), harm=1))
    for note in notes_of(seen, "policy"):
        if note["count"] >= 10 and note["first"]["lowered"] and note["last"]["lowered"]:
            text = "actions become less likely where what multiplies their log-probability is high"
            change = "put a minus before the product, unless it is a cost"
            found.append(Finding("sign of the policy", "look", text, change, place(note), harm=3))
    return found


def first_value(seen: Seen) -> list[Finding]:
    for note in notes_of(seen, "value"):
        first: dict[str, Any] = note["first"]
        loss, chance = first["loss"], first["chance"]
        if falls(seen["losses"]):
            continue
        if first["name"] == "mse_loss":
            if first["target"] > 100 * max(first["output"], 1) and loss > 2 * chance:
                text = (
                    f"targets are {first['target']:.3g} in the root mean square and outputs "
                    f"{first['output']:.3g}; the loss does not fall from {loss:.3g}"
                )
                change = "scale the targets to mean 0 and deviation 1"
                return [Finding("targets far from outputs", "likely", text, change, place(note))]
        elif loss > 5 * chance + 2:
            text = f"the first loss is {loss:.3g}, and chance gives {chance:.3g}"
            change = "start with smaller weights in the last layer, and scale the inputs"
            return [Finding("first loss", "likely", text, change, place(note))]
    return []


def signs(seen: Seen) -> list[Finding]:
    """A loss of one's own: the log-probability of the labels, without its minus."""
    losses = seen["losses"]
    if not losses or max(losses) > 0 or losses[-1] >= losses[0]:
        return []
    course = f"from {losses[0]:.3g} to {losses[-1]:.3g}"
    return [
        Finding(
            "loss is maximized",
            "certain",
            f"the log-probability of the labels is minimized: {course}",
            "put a minus before it, or use cross_entropy",
            place(note),
            harm=3,
        )
        for note in notes_of(seen, "picked log-probabilities")
        if note["count"] >= 10 and note["first"]["lowered"] and note["last"]["lowered"]
    ]


CHECKS = (plain_notes, empty, not_finite, goes_up, signs, weakened, labels, first_value)
