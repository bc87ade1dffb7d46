"""The result of a comparison of two runs in sentences."""

from collections.abc import Iterator
from typing import Any

from flambeau.compare.line_difference import FigureDifference
from flambeau.compare.recorded_facts import Difference, RecordedFacts
from flambeau.compare.run_comparison import RunComparison

_MAX_CAUSES = 5
_LONGEST = 80
_TRAINING_DATA = {
    "train_fingerprint",
    "train_content",
    "train_names",
    "train_samples",
    "mean",
    "std",
    "classes",
    "channels",
    "pixels",
}
_VALIDATION_DATA = {"val_fingerprint", "val_content", "val_samples"}
_FILES = {
    "model_file_sha256": "the file of the model",
    "teacher_sha256": "the weights of the teacher",
    "class_weights": "the weights of the classes",
}


def verdict(comparison: RunComparison, *, replayed: bool = False) -> str:
    """One paragraph: whether, where and why the two differ, as far as the folders show.

    `replayed`: one on a replay follows, so none is advised.
    """
    if not comparison.has_evidence:
        return (
            "There is nothing to compare: no line of metrics.jsonl and no checkpoint is of a step that both "
            "have." + _because(comparison)
        )
    return " ".join(sentence for sentence in _sentences(comparison, replayed) if sentence)


def _sentences(comparison: RunComparison, replayed: bool) -> Iterator[str]:
    if comparison.damaged:
        yield _damage_sentence(comparison)
    if comparison.divergence is None:
        yield _equal_sentence(comparison)
        yield _because(comparison).strip()
        return
    if comparison.is_evaluation_only and comparison.lines.first is not None:
        steps = listed_steps(comparison.equal_steps)
        yield (
            f"Their training is equal to the bit at {steps}; what differs is a figure, "
            f"{figure_line(comparison.lines.first)}: the evaluation, or what is logged."
        )
        yield _because(comparison, replayed).strip()
        return
    low, high = comparison.divergence
    steps = f"at step {high}" if low == high else f"in one of the steps {low} to {high}"
    steps = steps if high else "before step 1"
    yield f"They part {steps}: {_evidence(comparison)}."
    state = comparison.state
    flipped = None if state is None else state.flipped_bit
    if flipped is not None:
        yield (
            f"One bit of one element of {flipped.name} is all that differs, and the file is as it was "
            "written (its SHA-256 is right): the bit has flipped in the memory of one of the two runs."
        )
    yield _because(comparison, replayed).strip()
    if not causes(comparison) and flipped is None:
        yield _unexplained(comparison, replayed)


def _damage_sentence(comparison: RunComparison) -> str:
    texts = []
    for damaged in comparison.damaged[:3]:
        where = f"{damaged.name} of {comparison.runs[damaged.run].folder.path}"
        text = f"{where} is damaged: {damaged.why}"
        if damaged.changed_bytes is not None:
            text += f"; it was written equal to the other run's: {damaged.changed_bytes}"
        texts.append(text)
    return f"{'; '.join(texts)}."


def _equal_sentence(comparison: RunComparison) -> str:
    lines = comparison.lines
    texts = []
    if lines.num_figures:
        texts.append(
            f"{lines.num_figures} figures of metrics.jsonl up to step {lines.identical_steps}"
        )
    if comparison.equal_steps:
        texts.append(f"all that a checkpoint holds at {listed_steps(comparison.equal_steps)}")
    if comparison.equal_losses:
        texts.append(f"the losses of {len(comparison.equal_losses)} single steps")
    if not texts:
        return ""
    text = f"All that both have is equal to the bit: {', '.join(texts)}."
    if lines.steps[0] != lines.steps[1]:
        text += f" They end at steps {lines.steps[0]} and {lines.steps[1]}."
    return text


def _evidence(comparison: RunComparison) -> str:
    """What shows that they differ, and what was still equal."""
    texts = []
    state = comparison.state
    if comparison.equal_steps:
        texts.append(f"all tensors are equal to the bit at step {comparison.equal_steps[-1]}")
    if comparison.loss is not None:
        step, values = comparison.loss
        before = (
            f", that of step {step - 1} is equal" if step - 1 in comparison.equal_losses else ""
        )
        texts.append(f"the loss of step {step} is {values[0]!r} and {values[1]!r}{before}")
    if state is not None and state.tensors:
        first = state.tensors[0].name
        texts.append(
            f"{len(state.tensors)} of {state.num_tensors} tensors differ at step {state.step}, such as "
            f"{first}"
        )
    elif state is not None:
        name, values = next(iter(state.values.items()))
        texts.append(f"{name} at step {state.step} is {_pair(values)}")
    if comparison.lines.first is not None and (comparison.loss is None or state is None):
        figure = comparison.lines.first
        texts.append(f"{figure.name} at step {figure.step} is {_pair(figure.values)}")
    return "; ".join(texts)


def _because(comparison: RunComparison, replayed: bool = True) -> str:
    texts = causes(comparison)
    if not texts:
        return ""
    more = f", and {len(texts) - _MAX_CAUSES} more" if len(texts) > _MAX_CAUSES else ""
    listed = "; ".join(texts[:_MAX_CAUSES])
    if comparison.divergence is None and comparison.has_numbers:
        return f" What differs between them and has shown no effect: {listed}{more}."
    which = " (which of them, --replay may tell)" if len(texts) > 1 and not replayed else ""
    return f" What differs between them{which}: {listed}{more}."


def _unexplained(comparison: RunComparison, replayed: bool) -> str:
    if not all(run.is_command for run in comparison.runs):
        return (
            "Nothing that the folders tell explains it: the code of a script and its data are not in them. "
            "Say what identifies them by config= of Run."
        )
    text = (
        "Settings, data and environment are the same, so it is none of them: "
        f"{unrecorded_causes(comparison.runs[0])}."
    )
    advice = " --replay tells which of the two is not what its settings give."
    return text if replayed else text + advice


def unrecorded_causes(run: RecordedFacts) -> str:
    """What can make two runs differ and is in none of their files."""
    text = "a fault in memory, or an operation without a fixed order"
    if run.data.get("train_content"):  # the fingerprint is of names and sizes
        text += ", or an image that was changed in place and kept its size"
    return text


def causes(comparison: RunComparison) -> list[str]:
    """The differences that matter in words, causes before effects."""
    facts = [fact for fact in comparison.facts if fact.matters]
    texts = [fact_text(fact) for fact in facts if fact.kind == "setting"]
    data = {fact.name for fact in facts if fact.kind == "data"}
    texts += [text for name, text in _FILES.items() if name in data]
    if data & _TRAINING_DATA or comparison.sample is not None:
        text = "the training data"
        if comparison.sample is not None:
            text += f": {comparison.sample.text}"
            step = comparison.sample.step
            text += f", which is seen first at step {step}" if step is not None else ""
        elif comparison.why_no_sample is not None:
            text += f" (which sample is not known: {comparison.why_no_sample})"
        texts.append(text)
    if data & _VALIDATION_DATA:
        texts.append("the validation data")
    texts += [fact_text(fact) for fact in facts if fact.kind in ("environment", "history")]
    for run, rows in zip(comparison.runs, comparison.lines.rollbacks, strict=True):
        bad = [value_text(row["bad_step"]) for row in rows[:3]]
        texts += [
            f"step {step} of {run.folder.path} was not finite, and it went back" for step in bad
        ]
    return texts


def fact_text(fact: Difference) -> str:
    """A difference in a few words."""
    at = "" if fact.step is None else f" at step {fact.step}"
    is_variable = fact.name.isupper()  # of the environment of a process
    in_words = fact.kind == "environment" and not is_variable
    name = fact.name.replace("_", " ") if in_words else fact.name
    return f"{name} ({_pair(fact.values)}{at})"


def _pair(values: tuple[Any, Any]) -> str:
    return f"{value_text(values[0])} and {value_text(values[1])}"


def value_text(value: Any) -> str:
    text = "not given" if value is None else str(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def listed_steps(steps: list[int]) -> str:
    """'steps 5, 10 and 15'."""
    if len(steps) == 1:
        return f"step {steps[0]}"
    shown = steps if len(steps) <= 4 else [steps[0], steps[-1]]
    return (
        f"steps {', '.join(map(str, shown[:-1]))} {'and' if len(steps) <= 4 else 'to'} {shown[-1]}"
    )


def figure_line(first: FigureDifference) -> str:
    """The first figure that differs, with its change."""
    change = "" if first.change is None else f" ({first.change:+.3g})"
    return f"{first.name} at step {first.step}: {_pair(first.values)}{change}"
