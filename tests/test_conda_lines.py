"""The lines for conda in docs/*/installing.md, read by rattler, which parses packages as conda does.

`pip install py-rattler` (25 MB) runs these tests; no channel is asked.
"""

import re
from pathlib import Path

import pytest

rattler = pytest.importorskip("rattler", reason="needs py-rattler")
DOCS = Path(__file__).resolve().parents[1] / "docs"
WITH_VALUE = {"-c", "-n"}


def lines_of(language: str) -> list[str]:
    text = (DOCS / language / "installing.md").read_text(encoding="utf-8")
    return re.findall(r"conda (?:create|install|update|search) [^`&\n]+", text)


def packages_of(line: str) -> list[str]:
    words = iter(line.split()[2:])
    found = []
    for word in words:
        if word in WITH_VALUE:
            next(words)
        elif not word.startswith("--"):
            found.append(word)
    return found


@pytest.mark.parametrize("language", ["en", "zh"])
def test_each_package_of_a_line_is_one_for_conda(language):
    lines = lines_of(language)
    assert len(lines) == 4
    for line in lines:
        names = [str(rattler.MatchSpec(word).name.normalized) for word in packages_of(line)]
        assert {"pytorch"} <= set(names) <= {"python", "pytorch", "torchvision"}, line


@pytest.mark.parametrize("language", ["en", "zh"])
def test_each_channel_of_a_line_has_a_name_that_rattler_takes(language):
    channels = re.findall(r"-c (\S+)", " ".join(lines_of(language)))
    assert {rattler.Channel(name).name for name in channels} == {"conda-forge", "pytorch"}


def test_a_line_with_a_mistake_is_refused():
    from rattler.exceptions import InvalidMatchSpecError

    with pytest.raises(InvalidMatchSpecError, match="not a valid package name"):
        rattler.MatchSpec(packages_of("conda install -c conda-forge pytorch[[=2")[0])
