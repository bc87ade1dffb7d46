"""`flambeau how`: where the answer is, its sentence, code that is on that page, and a command that works."""

import json
import shlex
from pathlib import Path

import pytest

from flambeau.cli.command import main

DOCS = Path(__file__).resolve().parents[2] / "docs"


def answers(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, str]]:
    assert main(["how", "--json", *words]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    ("words", "page", "code"),
    [
        ("how do I freeze layers", "en/recipes/freezing.md", "freeze(model"),
        ("overfitting", "en/overfitting.md", "F.cross_entropy"),
        ("怎么画混淆矩阵", "zh/recipes/confusion_matrix.md", "ConfusionMatrix(3)"),
        ("label smothing", "en/recipes/label_smoothing.md", "cross_entropy(logits"),
    ],
)
def test_the_code_of_an_answer_is_on_its_page(
    words: str, page: str, code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first = answers(capsys, words)[0]
    assert code in first["code"]
    assert first["code"] in (DOCS / page).read_text(encoding="utf-8")
    _, *command = shlex.split(first["next"])
    assert main(command) == 0
    assert first["code"] in capsys.readouterr().out


def test_a_message_is_answered_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["how", "RuntimeError: mat1 and mat2 shapes cannot be multiplied (8x9 and 7x6)"]) == 0
    )
    said = capsys.readouterr()
    where, line, *rest = said.out.splitlines()
    assert where.startswith("errors_and_old_names.md#shapes-and-types")
    assert "`flatten(1)` is missing" in line
    assert len(rest) == 4  # two more answers, and no code of another row
    assert said.err.startswith("next: flambeau recipes page errors_and_old_names.md#")


@pytest.mark.parametrize(
    "words",
    [
        "torch.symeig",
        "AttributeError: module 'torch' has no attribute 'symeig'",
        "ImportError: cannot import name 'symeig' from 'torch' (/venv/torch/__init__.py)",
    ],
)
def test_an_old_name_is_answered_by_a_rule_of_the_linter(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first = answers(capsys, words)[0]
    assert first["kind"] == "rule"
    assert "torch.linalg.eigh" in first["line"]
    old, today = first["code"].split("# today")
    assert "torch.symeig(" in old
    assert "torch.linalg.eigh(" in today
    _, *command = shlex.split(first["next"])
    assert main(command) == 0
    assert first["line"] in capsys.readouterr().out


def test_a_flag_is_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    first = answers(capsys, "stop after this many epochs without a better value", "--top", "1")[0]
    assert (first["kind"], first["code"]) == ("flag", "flambeau train DATA --early-stop VALUE")


@pytest.mark.parametrize("words", [["qzqzq"], ["?"], ["犇骉"]])
def test_no_answer_ends_with_1(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["how", *words]) == 1
    assert capsys.readouterr().err.startswith("flambeau: no page knows any of")


def test_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["how", "ema", "--top", "0"]) == 2
    assert "--top" in capsys.readouterr().err
    assert main(["how"]) == 2
    assert "WORD" in capsys.readouterr().err


def test_an_escaped_bar_does_not_end_a_cell_of_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    [first, *_] = answers(capsys, "a cell such as sunny;tidy in a column labels, tags, class")
    assert first["line"].startswith("a cell such as `sunny|tidy` or `sunny;tidy`, in a column")
