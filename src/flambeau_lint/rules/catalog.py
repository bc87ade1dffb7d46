"""All rules, in the order of their codes."""

import re
from collections.abc import Sequence

from flambeau_lint.rule import Rule
from flambeau_lint.rules import (
    arguments,
    changed,
    image_channels,
    lightning,
    linalg,
    losses,
    lost_work,
    mistakes,
    mixed_precision,
    refused,
    tensor_methods,
    torch_names,
    training,
    training_steps,
    variables,
    vision_names,
    worker_random,
)

_TABLES: Sequence[Sequence[Rule]] = (
    linalg.RULES,
    torch_names.RULES,
    vision_names.RULES,
    variables.RULES,
    mixed_precision.RULES,
    arguments.RULES,
    tensor_methods.RULES,
    training.RULES,
    training_steps.RULES,
    mistakes.RULES,
    losses.RULES,
    lost_work.RULES,
    refused.RULES,
    lightning.RULES,
    changed.RULES,
    image_channels.RULES,
    worker_random.RULES,
)


def _by_number(rule: Rule) -> "tuple[int, int]":
    return int(rule.code[3]), int(rule.code[4:])


RULES: list[Rule] = sorted((rule for table in _TABLES for rule in table), key=_by_number)
"""FLB1 removed, FLB2 deprecated, FLB3 changed, FLB4 wrong, FLB5 unsafe, FLB6 slow."""

BY_CODE: dict[str, Rule] = {rule.code: rule for rule in RULES}
"""Each rule by its code."""


def is_selected(rule: Rule, words: Sequence[str]) -> int:
    """How well a rule fits codes, beginnings of codes, names and kinds: the length of the best; 0 if none does."""
    best = 0
    for word in words:
        if word in ("ALL", "all"):
            best = max(best, 1)
        elif word == rule.name or word == rule.code:
            best = max(best, 20)
        elif word == rule.kind:
            best = max(best, 4)
        elif (re.fullmatch(r"FLB\d?", word) and rule.code.startswith(word)) or (
            re.fullmatch(r"FLB\d\d+", word) and word not in BY_CODE and rule.code.startswith(word)
        ):
            best = max(best, len(word))
    return best


def unknown(words: Sequence[str]) -> list[str]:
    """Words that select nothing."""
    return [word for word in words if not any(is_selected(rule, [word]) for rule in RULES)]
