"""The one table of formats: what the code and the docs say of them follows it."""

from pathlib import Path

import pytest

from flambeau.data.pack import writers
from flambeau.data.sources.arrays import array_source
from flambeau.data.sources.packed_formats import FORMATS, KIND_OF_ENDING, endings_of

ROOT = Path(__file__).resolve().parents[3]


def test_each_format_is_written_and_read_by_one_function() -> None:
    packed = {form.kind for form in FORMATS.values() if form.holds != "paths"}
    arrays = {form.kind for form in FORMATS.values() if form.is_array}
    assert packed == writers._WRITERS.keys() | writers._SAVERS.keys() | set(writers.TABLES)
    assert arrays == writers._SAVERS.keys() == array_source._OPEN.keys()


def test_no_ending_stands_for_two_formats() -> None:
    endings = [ending for form in FORMATS.values() for ending in form.endings]
    assert len(endings) == len(KIND_OF_ENDING)
    assert all(ending == ending.lower() and ending.startswith(".") for ending in endings)


@pytest.mark.parametrize("name", ["docs/en/data.md", "docs/zh/data.md"])
def test_the_docs_list_each_ending(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert [ending for ending in KIND_OF_ENDING if f"`{ending}`" not in text] == [".mdb"]


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_the_readme_lists_the_formats(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert endings_of("files", "both", "pixels") in text
