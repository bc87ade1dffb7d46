"""What `flambeau lint` names in a file of the tests, for torch 2.15."""

from pathlib import Path

from flambeau_lint.checked_file import Place, check
from flambeau_lint.engine import RuleSet, choose
from flambeau_lint.rules.catalog import RULES
from flambeau_lint.versions import versions_for


def rules(*, preview: bool) -> RuleSet:
    return RuleSet(choose(RULES, versions_for("2.15"), preview=preview))


def places(path: Path, among: RuleSet) -> tuple[Place, ...]:
    checked = check(path.name, path.read_bytes(), among)
    assert checked.problem == ""
    return checked.places
