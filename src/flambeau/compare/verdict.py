"""What a comparison of two runs amounts to, in plain words."""

from collections.abc import Iterator
from typing import Any

from flambeau.compare.line_difference import FigureDifference
from flambeau.compare.recorded_facts import Difference, RunFacts
from flambeau.compare.run_comparison import RunComparison

_MOST_CAUSES = 5
_LONGEST = 80
_OF_TRAINING_DATA = {
    "train_fingerprint",
    "train_content",
    "train_samples",
    "mean",
    "std",
    "classes",
    "channels",
    "pixels",
}
_OF_VALIDATION_DATA = {"val_fingerprint", "val_content", "val_samples"}
_FILES = {
    "model_file_sha256": "the file of the model",
    "teacher_sha256": "the weights of the teacher",
    "class_weights": "the weights of the classes",
}


def verdict(found: RunComparison, *, replayed: bool = False) -> str:
    """One paragraph: whether and where the two part, and why, as far as the folders tell.

    Args:
        found: how they compare.
        replayed: a paragraph on a replay follows, so that none is advised.
    """
    if not found.has_evidence:
        return (
            "There is nothing to compare: no line of metrics.jsonl and no checkpoint is of a step that both "
            "have." + _because(found)
        )
    return " ".join(sentence for sentence in _sentences(found, replayed) if sentence)


def _sentences(found: RunComparison, replayed: bool) -> Iterator[str]:
    yield from map(_of_damage, (found,) if found.damaged else ())
    if found.parts is None:
        yield _of_equals(found)
        yield _because(found).strip()
        return
    if found.is_of_evaluation and found.lines.first is not None:
        yield (
            f"Their training is equal to the bit at {listed_steps(found.equal_steps)}; what differs is a "
            f"figure, {figure_line(found.lines.first)}: the evaluation, or what is logged."
        )
        yield _because(found, replayed).strip()
        return
    low, high = found.parts
    steps = f"at step {high}" if low == high else f"in one of the steps {low} to {high}"
    steps = steps if high else "before step 1"
    yield f"They part {steps}: {_seen(found)}."
    state = found.state
    flipped = None if state is None else state.flipped_bit
    if flipped is not None:
        yield (
            f"One bit of one element of {flipped.name} is all that differs, and the file is as it was "
            "written (its SHA-256 is right): the bit has flipped in the memory of one of the two runs."
        )
    yield _because(found, replayed).strip()
    if not causes(found) and flipped is None:
        yield _unexplained(found, replayed)


def _of_damage(found: RunComparison) -> str:
    texts = []
    for damaged in found.damaged[:3]:
        where = f"{damaged.name} of {found.runs[damaged.run].folder.path}"
        how = (
            ""
            if damaged.as_the_other is None
            else f"; it was written equal to the other run's: {damaged.as_the_other}"
        )
        texts.append(f"{where} is damaged: {damaged.why}{how}")
    return f"{'; '.join(texts)}."


def _of_equals(found: RunComparison) -> str:
    lines = found.lines
    texts = []
    if lines.num_figures:
        texts.append(
            f"{lines.num_figures} figures of metrics.jsonl up to step {lines.identical_steps}"
        )
    if found.equal_steps:
        texts.append(f"all that a checkpoint holds at {listed_steps(found.equal_steps)}")
    if found.equal_losses:
        texts.append(f"the losses of {len(found.equal_losses)} single steps")
    if not texts:
        return ""
    text = f"All that both have is equal to the bit: {', '.join(texts)}."
    if lines.steps[0] != lines.steps[1]:
        text += f" They end at steps {lines.steps[0]} and {lines.steps[1]}."
    return text


def _seen(found: RunComparison) -> str:
    """What shows that they have parted, and what was still equal."""
    texts = []
    state = found.state
    if found.equal_steps:
        texts.append(f"all tensors are equal to the bit at step {found.equal_steps[-1]}")
    if found.loss is not None:
        step, values = found.loss
        before = f", that of step {step - 1} is equal" if step - 1 in found.equal_losses else ""
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
    if found.lines.first is not None and (found.loss is None or state is None):
        first_line = found.lines.first
        texts.append(f"{first_line.name} at step {first_line.step} is {_pair(first_line.values)}")
    return "; ".join(texts)


def _because(found: RunComparison, replayed: bool = True) -> str:
    found_causes = causes(found)
    if not found_causes:
        return ""
    more = (
        f", and {len(found_causes) - _MOST_CAUSES} more" if len(found_causes) > _MOST_CAUSES else ""
    )
    listed = "; ".join(found_causes[:_MOST_CAUSES])
    if found.parts is None and found.has_numbers:
        return f" What differs between them and has shown no effect: {listed}{more}."
    which = " (which of them, --replay may tell)" if len(found_causes) > 1 and not replayed else ""
    return f" What differs between them{which}: {listed}{more}."


def _unexplained(found: RunComparison, replayed: bool) -> str:
    if not all(run.is_command for run in found.runs):
        return (
            "Nothing that the folders tell explains it: the code of a script and its data are not in them. "
            "Say what identifies them by config= of Run."
        )
    text = (
        "Settings, data and environment are the same, so it is none of them: "
        f"{unrecorded_causes(found.runs[0])}."
    )
    advice = " --replay tells which of the two is not what its settings give."
    return text if replayed else text + advice


def unrecorded_causes(run: RunFacts) -> str:
    """What makes two runs differ and is in no file of theirs."""
    text = "a fault in memory, or an operation without a fixed order"
    if run.data.get("train_content"):  # the fingerprint is of names and sizes
        text += ", or an image that was changed in place and kept its size"
    return text


def causes(found: RunComparison) -> list[str]:
    """What differs and matters, in the order of cause and effect, in words."""
    facts = [fact for fact in found.facts if fact.matters]
    texts = [fact_text(fact) for fact in facts if fact.kind == "setting"]
    data = {fact.name for fact in facts if fact.kind == "data"}
    texts += [text for name, text in _FILES.items() if name in data]
    if data & _OF_TRAINING_DATA or found.sample is not None:
        text = "the training data"
        if found.sample is not None:
            text += f": {found.sample.text}"
            step = found.sample.step
            text += f", which is seen first at step {step}" if step is not None else ""
        elif found.why_no_sample is not None:
            text += f" (which sample is not known: {found.why_no_sample})"
        texts.append(text)
    if data & _OF_VALIDATION_DATA:
        texts.append("the validation data")
    texts += [fact_text(fact) for fact in facts if fact.kind in ("environment", "history")]
    for run, rows in zip(found.runs, found.lines.rollbacks, strict=True):
        bad = [value_text(row["bad_step"]) for row in rows[:3]]
        texts += [
            f"step {step} of {run.folder.path} was not finite, and it went back" for step in bad
        ]
    return texts


def fact_text(fact: Difference) -> str:
    """A difference in a sentence."""
    at = "" if fact.step is None else f" at step {fact.step}"
    name = fact.name.replace("_", " ") if fact.kind == "environment" else fact.name
    return f"{name} ({_pair(fact.values)}{at})"


def _pair(values: tuple[Any, Any]) -> str:
    return f"{value_text(values[0])} and {value_text(values[1])}"


def value_text(value: Any) -> str:
    """A value out of a file, not too long."""
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
