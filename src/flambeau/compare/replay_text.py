"""The result of a replay in sentences."""

from collections.abc import Iterator

from flambeau.compare.comparison_text import causes, fact_text, unrecorded_causes, value_text
from flambeau.compare.paired_replay import Replay, Reproduced
from flambeau.compare.recorded_facts import Difference, RecordedFacts
from flambeau.compare.run_comparison import RunComparison

_MAX = 4
_COMPUTING = {"model", "precision", "device", "compile", "recompute", "freeze"}
_SETTINGS: dict[str, set[str]] = {
    "start": {
        "seed",
        "model",
        "weights",
        "pretrained",
        "drop_path",
        "image_size",
        "freeze",
        "channels",
    },
    "length": {"batch_size", "accumulate", "duration", "extend", "early_stop", "balance"},
    "order": {"seed", "batch_size", "balance", "accumulate"},
    "size": {"image_size", "crop", "channels"},
    "pixels": {"seed", "image_size", "crop", "flip", "crop_scale", "padding"}
    | {"augment", "color_jitter", "channels", "bits"},
    "input": {"start_size", "random_erasing", "mixup", "cutmix", "seed"},
    "forward": _COMPUTING | {"drop_path", "sync_bn", "seed", "parts"},
    "loss": {"label_smoothing", "class_weights", "teacher", "teacher_weight", "temperature"}
    | {"mixup", "cutmix"},
    "backward": _COMPUTING,
    "gradient": _COMPUTING | {"accumulate", "batch_size", "parts", "compression"},
    "statistics": {"model", "freeze", "sync_bn", "parts"},
    "update": {"lr", "momentum", "betas", "weight_decay", "optimizer", "schedule", "milestones"}
    | {"gamma", "warmup", "duration", "extend", "patience", "plateau_factor", "clip_norm"}
    | {"head_lr", "layer_decay", "freeze", "pretrained", "weights", "accumulate", "compression"},
    "average": {"ema"},
}
"""By phase of a step, the settings that act in it."""
_WHAT = {
    "start": "what the training starts from: ",
    "update": "what the optimizer's step makes of equal gradients: ",
    "statistics": "the statistics that the model keeps, its outputs being equal: ",
    "average": "the average of the weights, these being equal: ",
}
_DATA_PHASES = {"order", "label", "pixels", "size", "input", "length"}
_MODEL_FILE_PHASES = {"start", "forward", "backward", "gradient", "statistics"}
_MACHINE_PHASES = {"forward", "backward", "gradient", "update", "loss", "statistics", "start"}


def replay_verdict(comparison: RunComparison, result: Replay) -> str:
    """One paragraph: the step, module and tensor that differ, and the cause."""
    if result.why_not is not None:
        return f"There is no replay: {result.why_not}."
    return " ".join(_sentences(comparison, result))


def _sentences(comparison: RunComparison, result: Replay) -> Iterator[str]:
    if result.difference is not None:
        at = f"at step {result.step}" if result.step else "before step 1"
        what = _WHAT.get(result.difference.phase, "")
        text = f"{what}{result.difference.text}"
        yield f"Replayed from step {result.start}, what differs first is, {at}, {text}."
        if result.options and result.difference.phase == "update":
            # A dict, because most options are the same for all groups.
            options = {
                f"{name.partition(': ')[2]} {a} and {b}": None
                for name, (a, b) in result.options.items()
            }
            yield f"Options of the optimizer differ there: {'; '.join(list(options)[:_MAX])}."
        expected = phase_causes(comparison, result.difference.phase)
        if expected:
            yield f"This is what is to be expected of {'; '.join(expected[:_MAX])}."
    else:
        until = " (out of time)" if result.is_out_of_time else ""
        yield (
            f"Replayed from step {result.start} with their own settings, data and threads, both are equal to "
            f"the bit up to step {result.last}{until}."
        )
    if result.difference is not None and all(outcome.is_equal for outcome in result.reproduced):
        first, second = (outcome.step for outcome in result.reproduced)
        yield (
            f"Each replay is equal to the bit to the checkpoint of its run (of steps {first} and {second}), "
            "so the cause is in what differs between the runs, and no fault of the machine."
        )
        return
    for number, outcome in enumerate(result.reproduced):
        yield from _run_sentences(comparison.runs[number], outcome)


def _run_sentences(run: RecordedFacts, outcome: Reproduced) -> Iterator[str]:
    name = run.folder.path
    if outcome.is_equal is None:
        return
    if outcome.is_equal:
        yield f"The replay of {name} is equal to its checkpoint of step {outcome.step} to the bit."
        return
    if outcome.loss is not None:
        step, (then, now) = outcome.loss
        how = f"the loss of step {step} was {then!r} and is {now!r} now"
    else:
        assert outcome.state is not None
        tensors = outcome.state.tensors
        how = f"{len(tensors)} tensors of its checkpoint of step {outcome.step} differ, such as {tensors[0]}"
    yield f"The replay of {name} is not what the run has recorded: {how}."
    if outcome.machine:
        changed = "; ".join(map(value_text, outcome.machine[:_MAX]))
        yield f"Here is another machine than there: {changed}."
    elif outcome.state is not None and outcome.state.flipped_bit is not None:
        yield "One bit is all that differs: it has flipped in the memory of that run."
    else:
        yield f"Nothing that is recorded of the machine differs: {unrecorded_causes(run)}."


def phase_causes(comparison: RunComparison, phase: str) -> list[str]:
    """The differences that act first in this part of a step, else all."""
    facts = [fact for fact in comparison.facts if fact.matters]
    names = _SETTINGS.get(phase, set())
    chosen = [fact_text(f) for f in facts if f.kind == "setting" and f.name in names]
    if phase == "update" and any(f.name in ("rollbacks", "lr_scale") for f in facts):
        chosen += [fact_text(f) for f in facts if f.kind == "history"]
    if not chosen:
        chosen = list(_other_causes(comparison, facts, phase))
    return chosen or causes(comparison)


def _other_causes(comparison: RunComparison, facts: list[Difference], phase: str) -> Iterator[str]:
    data = {fact.name for fact in facts if fact.kind == "data"}
    if phase in _MODEL_FILE_PHASES and "model_file_sha256" in data:
        yield "the file of the model"
    elif phase == "loss" and "teacher_sha256" in data:
        yield "the weights of the teacher"
    elif phase in _DATA_PHASES and (
        data & {"train_fingerprint", "train_content"} or comparison.sample
    ):
        yield "the training data" + (f": {comparison.sample.text}" if comparison.sample else "")
    elif phase in _MACHINE_PHASES:
        yield from (fact_text(f) for f in facts if f.kind in ("environment", "history"))
