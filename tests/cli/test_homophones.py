from collections import Counter

import pytest

from flambeau.cli.homophones import FIRSTS, Homophones, place_of, sounds_of
from flambeau.cli.recipe_search import Index


def test_the_first_characters_are_in_the_order_of_the_standard() -> None:
    places = [place_of(character) for character in FIRSTS]
    assert None not in places
    assert places == sorted(set(places))  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("one", "other"),
    [("拟合", "你和"), ("显存", "险村"), ("率", "律"), ("略", "掠")],
)
def test_homophones_have_the_same_sounds(one: str, other: str) -> None:
    assert sounds_of(one) == sounds_of(other) is not None


@pytest.mark.parametrize(("one", "other"), [("路", "率"), ("奴", "女"), ("乱", "略"), ("论", "略")])
def test_other_vowels_have_others(one: str, other: str) -> None:
    assert sounds_of(one) != sounds_of(other)


def test_what_is_no_common_character_has_no_sound() -> None:
    assert sounds_of("a存") is None
    assert sounds_of("魍魉") is None  # of the second level, which is sorted by radicals


COUNTS = Counter(
    {"过拟": 9, "拟合": 9, "数据": 9, "据增": 5, "增强": 9, "存一": 9, "溢出": 7, "一出": 1}
)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("过你和怎么办", "过拟合怎么办"),
        ("数据曾强", "数据增强"),
        ("过拟合", "过拟合"),
        ("一出", "一出"),  # which a text has
        ("拟和 overfitting", "拟合 overfitting"),
        ("", ""),
        ("loss", "loss"),
    ],
)
def test_corrected(typed: str, meant: str) -> None:
    assert Homophones(COUNTS).corrected(typed) == meant


def test_a_rare_pair_corrects_nothing() -> None:
    assert Homophones({"拟合": 4}).corrected("你和") == "你和"


@pytest.mark.parametrize("typed", ["过你和", "早听", "显村占用", "标签平划", "余弦推火"])
def test_the_search_finds_what_was_meant(typed: str) -> None:
    meant = {
        "过你和": "过拟合",
        "早听": "早停",
        "显村占用": "显存占用",
        "标签平划": "标签平滑",
        "余弦推火": "余弦退火",
    }
    index = Index(chinese=True)
    assert index.search(typed, top=3) == index.search(meant[typed], top=3) != []


@pytest.mark.parametrize(
    ("query", "name"),
    [
        ("clip_grad_norm", "errors_and_old_names.md#old-names"),
        ("torch.nn.utils.clip_grad_norm", "errors_and_old_names.md#old-names"),
        ("loss.data", "errors_and_old_names.md#old-names"),
    ],
)
def test_a_name_of_code_is_one_word(query: str, name: str) -> None:
    assert [entry.name for entry in Index(chinese=False).search(query, top=1)] == [name]
