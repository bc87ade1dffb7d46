"""Whether batches, modes and random numbers are those of a training that learns."""

import ast
import itertools
from pathlib import Path

from flambeau.tune.learning.finding import Finding, Seen, notes_of, place
from flambeau.tune.watch.learning.loss_course import falls

_FEW = 5
_SHARED = 0.05  # of the data of evaluation; a data set may hold some twice; chosen


def inputs(seen: Seen) -> list[Finding]:
    rows = seen["inputs"]
    if not rows:
        return []
    where = place(seen["input_line"])
    high = sorted(max(abs(one["low"]), abs(one["high"])) for one in rows)[len(rows) // 2]
    mean = sorted(abs(one["mean"]) for one in rows)[len(rows) // 2]
    std = sorted(one["std"] for one in rows)[len(rows) // 2]
    measured = f"mean {rows[0]['mean']:.3g}, deviation {std:.3g}, up to {high:.3g}"
    if high >= 100 and (mean**2 + std**2) ** 0.5 >= 20 and not seen["is_normalized"]:
        text = f"the first layer reads large numbers: {measured}"
        change = "scale inputs to mean 0 and deviation 1 (images: divide by 255 first)"
        return [Finding("inputs not scaled", "likely", text, change, where)]
    if 0 < std < 0.01 * max(mean, 0.01) and not seen["is_normalized"]:
        text = f"inputs hardly differ: {measured}"
        change = "scale inputs once, to mean 0 and deviation 1"
        where = place(seen["own_line"]) or _assignment_before(*seen["input_line"]) or where
        return [Finding("inputs hardly differ", "likely", text, change, where)]
    return []


def _assignment_before(file: str, line: int) -> str:
    """The last line of a function that made a value which a line of it reads; '' if there is none."""
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return ""
    scope: ast.AST = tree
    for node in ast.walk(tree):  # the innermost function comes last
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            scope = node if node.lineno <= line <= (node.end_lineno or 0) else scope
    names = [node for node in ast.walk(scope) if isinstance(node, ast.Name)]
    read = {one.id for one in names if one.lineno == line}
    made = [
        one.lineno
        for one in names
        if one.id in read and isinstance(one.ctx, ast.Store) and one.lineno < line
    ]
    return f"{file}:{max(made)}" if made else ""


def batches(seen: Seen) -> list[Finding]:
    found = []
    for one in seen["loaders"]:
        where = place(one)
        count = one["hashed_batches"]
        for key, what in (
            ("same_rows", "all samples of a batch are equal"),
            ("constant", "all values of a batch are equal"),
            ("not_finite", "a batch has inf or nan"),
        ):
            if (one[key] >= 3 and one[key] > 0.5 * one["batches"]) or (
                key == "not_finite" and one[key]
            ):
                text = f"{what}, in {one[key]} of {one['batches']} batches"
                change = "look at what the data set returns for several indices"
                line = place(one["item"]) or where
                found.append(Finding(key.replace("_", " "), "certain", text, change, line, harm=3))
        if not one["trained"]:
            continue
        is_restarted = one["iterations"] >= _FEW and one["batches"] <= 1.1 * one["iterations"]
        if is_restarted and count >= _FEW and one["different_batches"] == 1 and one["trained"] > 1:
            text = f"{count} new iterators of the loader gave the same first batch"
            change = "make the iterator once per epoch: for batch in loader"
            found.append(Finding("same batch", "certain", text, change, where, harm=3))
        is_labelled = one["labelled"] >= _FEW and one["classes"] > 1
        if is_labelled and one["one_class"] > 0.8 * one["labelled"]:
            text = f"{one['one_class']} of {one['labelled']} batches hold one class only"
            change = "shuffle: DataLoader(..., shuffle=True)"
            found.append(Finding("not shuffled", "likely", text, change, where, harm=3))
        found += _repeats(seen, one)
    return found


def _repeats(seen: Seen, one: Seen) -> list[Finding]:
    found = []
    where = place(one)
    epochs = one["epochs"]
    if len(epochs) > 1 and len(set(epochs)) == 1:
        text = (
            f"the DistributedSampler began {len(epochs)} epochs with the order of epoch {epochs[0]}"
        )
        change = "call sampler.set_epoch(epoch) before each epoch"
        found.append(Finding("no set_epoch", "certain", text, change, where, "FLB406", 1))
    if one["is_iterable"] and one["workers"] > 1 and one["iterations"] == 1:
        times = one["samples"] / max(one["different_samples"], 1)
        if times > 1.7:
            text = f"each sample came {times:.1f} times in one epoch, with {one['workers']} workers"
            change = "give each worker its share, by torch.utils.data.get_worker_info()"
            found.append(Finding("workers repeat samples", "certain", text, change, where))
    return found


def seeds(seen: Seen) -> list[Finding]:
    return _seeded_epochs(seen) or [
        Finding(
            "same random numbers",
            "certain",
            f"{note['last']['what']}({note['last']['seed']}) was called {note['count']} times in "
            f"{note['last']['step']} steps",
            "seed once, before the training",
            place(note),
        )
        for note in notes_of(seen, "seed")
        if note["count"] >= 10
        and note["first"]["seed"] == note["last"]["seed"]
        and note["count"] >= 0.8 * (note["last"]["step"] - note["first"]["step"])
    ]


def _seeded_epochs(seen: Seen) -> list[Finding]:
    """One seed before several epochs: a loader that shuffles gives each of them in one order."""
    for loader in seen["loaders"]:
        starts = loader["starts"]
        is_again = loader["is_shuffled"] and loader["different_starts"] == 1 < starts
        if not (is_again and loader["trained"] and loader["batches"] > 1.5 * starts):
            continue
        for note in notes_of(seen, "seed"):
            is_torchs = note["last"]["what"] == "torch.manual_seed"  # samplers draw from it
            if is_torchs and note["first"]["seed"] == note["last"]["seed"]:
                what = f"{note['last']['what']}({note['last']['seed']})"
                text = f"{starts} epochs began with the same batch: {what} is called in between"
                change = "seed once, before the training"
                return [Finding("same random numbers", "certain", text, change, place(note))]
    return []


def modes(seen: Seen) -> list[Finding]:
    found = []
    for note in notes_of(seen, "trains in eval mode"):
        text = f"after {note['first']['after'] - 1} steps the model trains in eval mode"
        change = "call model.train() after each evaluation"
        found.append(Finding("eval mode", "certain", text, change, place(note), "FLB436"))
    for note in notes_of(seen, "evaluation in train mode"):
        text = f"{note['count']} batches were evaluated in train mode (dropout or BatchNorm)"
        change = "call model.eval() before"
        found.append(Finding("train mode", "certain", text, change, place(note), "FLB443"))
    return found


def normalization(seen: Seen) -> list[Finding]:
    found = []
    for note in notes_of(seen, "batch norm"):
        values = max(note["first"]["values"], note["last"]["values"])
        momentum = note["first"]["momentum"]
        if note["count"] >= _FEW and values <= 2:
            text = f"BatchNorm takes its statistics from {values} values per channel"
            change = "use larger batches, or GroupNorm or LayerNorm"
            found.append(Finding("tiny batches", "likely", text, change, place(note)))
        if momentum is not None and not 0.002 <= momentum < 0.9:
            is_high = momentum >= 0.9
            sure = "likely" if is_high else "look"
            what = "those of the last batch" if is_high else "nearly those at the start"
            text = f"BatchNorm has momentum={momentum:g}: its statistics in evaluation are {what}"
            change = "torch's momentum is the share of the new batch: 0.1 is usual"
            found.append(Finding("stale statistics", sure, text, change, place(note)))
    return found


def permutations(seen: Seen) -> list[Finding]:
    found = []
    rows = notes_of(seen, "permutation")
    for one, other in itertools.permutations(rows, 2):
        is_next = one["file"] == other["file"] and 0 < other["line"] - one["line"] <= 3
        is_pair = one["first"] == other["first"] and one["count"] == other["count"]
        if is_next and is_pair and one["first"]["n"] > 16 and not falls(seen["losses"]):
            text = f"{one['first']['n']} samples were permuted twice, and the loss does not fall"
            change = "make one permutation, and index inputs and labels by it"
            found.append(Finding("permuted apart", "likely", text, change, place(other), harm=3))
    return found


def evaluation_data(seen: Seen) -> list[Finding]:
    found = []
    for row in seen["shared"]:
        if row["twice"] >= 5 and row["twice"] > _SHARED * row["samples"]:
            text = (
                f"{row['twice']} of {row['samples']} samples of evaluation are training data, too"
            )
            change = "split before anything else, so that no sample is in both"
            found.append(
                Finding("validation in training", "certain", text, change, place(row["where"]))
            )
    for row in seen["augmented"]:
        text = f"{row['differ']} of {row['samples']} samples of evaluation differ when read again"
        change = "give the data of evaluation transforms without random numbers"
        found.append(
            Finding("augmented validation", "likely", text, change, place(row["where"]), harm=1)
        )
    return found


def weights(seen: Seen) -> list[Finding]:
    return [
        Finding(
            "nothing loaded",
            "certain",
            f"load_state_dict(strict=False) found 0 of {note['last']['whole']} names among "
            f"{note['last']['given']}",
            "rename the keys: flambeau convert and recipes.checkpoints.state_dict_prefixes help",
            place(note),
        )
        for note in notes_of(seen, "loaded")
        if not note["last"]["found"] and note["last"]["given"]
    ]


CHECKS = (inputs, batches, seeds, permutations, modes, normalization, evaluation_data, weights)
