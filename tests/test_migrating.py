"""docs/en/migrating: before and after end with the same weights, where the peer is installed."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

PAGES = Path(__file__).resolve().parents[1] / "docs" / "en" / "migrating"
# What the peers warn of is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("peer", ["lightning", "accelerate"])
def test_before_and_after_agree(peer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(peer)
    monkeypatch.chdir(tmp_path)
    text = (PAGES / f"from_{peer}.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in re.findall(r"^```(?:python|text)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        exec(compile(block, peer, "exec"), names)
    before, after = names["before"].state_dict(), names["after"].state_dict()
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor)


def test_every_page_names_what_flambeau_has_not() -> None:
    pages = sorted(PAGES.glob("*.md"))
    assert len(pages) == 4
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert "\n## What becomes what\n" in text
        assert re.search(r"\n## What (flambeau does not have|stays yours)\n", text)
