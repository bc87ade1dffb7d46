"""What an export of a task calls its outputs, and the lines of its examples that use them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ExportWords:
    """The words of a task.

    N: images, K: outputs, H, W: of the given pixels, S: side of the model's input.

    Attributes:
        outputs_are: what the outputs stand for, in the plural.
        cpp_name: the task in classify.cpp.
        answer: the second output of a graph: 'probabilities'.
        answer_how: how it is made of the logits, for the model card.
        compared: what `Task.decode` returns, to compare steps of an export.
        of_logits: the answer's expression in example.py, with `logits` of one image.
        example_lines: what example.py does with one image's answer; it has `preprocessing`.
        logits_shape, answer_shape: for the model card, with K as {classes}.
    """

    outputs_are: str
    cpp_name: str
    answer: str
    answer_how: str
    compared: str
    of_logits: str
    example_lines: str
    logits_shape: str = "(N, {classes}) float32"
    answer_shape: str = "(N, {classes}) float32"
