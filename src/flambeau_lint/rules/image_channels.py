"""Gray images that are normalized as if they had three channels."""

import ast
from collections.abc import Iterator
from typing import Optional

from flambeau_lint import edits
from flambeau_lint.program import Program, once
from flambeau_lint.renaming import finding
from flambeau_lint.rule import Edit, Finding, Fix, Rule
from flambeau_lint.rules.argument_rows import constant

_TRANSFORMS = "torchvision.transforms."
_GRAY = {
    f"torchvision.datasets.{name}" for name in ("MNIST", "FashionMNIST", "KMNIST", "QMNIST", "USPS")
}
_KEEP_CHANNELS = {
    *("CenterCrop", "Normalize", "Pad", "RandomAffine", "RandomCrop", "RandomHorizontalFlip"),
    *("RandomResizedCrop", "RandomRotation", "RandomSizedCrop", "RandomVerticalFlip", "Resize"),
    *("Scale", "ToTensor"),
}


def _three_channels(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """Normalize of three numbers in a Compose that only data sets of gray images take."""
    assert isinstance(node, ast.Call)
    values = [edits.argument(node, 0, "mean"), edits.argument(node, 1, "std")]
    chain = program.parents.get(node)
    compose = program.parents.get(chain) if isinstance(chain, ast.List) else None
    if not isinstance(chain, ast.List) or not isinstance(compose, ast.Call):
        return
    if program.dotted(compose.func) != f"{_TRANSFORMS}Compose" or edits.is_open(node):
        return
    if not all(_keeps_channels(program, one) for one in chain.elts):
        return
    uses = _uses(program, compose)
    if uses and all(_is_for_gray(program, use) for use in uses):
        firsts = [edit for value in values for edit in _first_alone(program, value)]
        if len(firsts) == len(values):
            yield finding(program, rule, node, Fix(tuple(firsts)))


def _keeps_channels(program: Program, node: ast.expr) -> bool:
    dotted = program.dotted(node.func) if isinstance(node, ast.Call) else ""
    return dotted.startswith(_TRANSFORMS) and dotted[len(_TRANSFORMS) :] in _KEEP_CHANNELS


def _uses(program: Program, compose: ast.Call) -> list[ast.expr]:
    """Where a Compose is used: as it stands, or by the one name that it is assigned to."""
    parent = program.parents.get(compose)
    if not isinstance(parent, ast.Assign):
        return [compose]
    target = parent.targets[0]
    if len(parent.targets) > 1 or not isinstance(target, ast.Name):
        return []
    return _uses_of_only_value(program, target.id).get(compose, [])


@once
def _uses_of_only_value(program: Program, name: str) -> dict[ast.expr, list[ast.expr]]:
    """The uses of a name, by the only value that they can have."""
    found: dict[ast.expr, list[ast.expr]] = {}
    for use in program.loads.get(name, ()):
        values = program.values_of(use)
        if len(values) == 1:
            found.setdefault(values[0], []).append(use)
    return found


def _is_for_gray(program: Program, use: ast.expr) -> bool:
    parent = program.parents.get(use)
    call = program.parents.get(parent) if isinstance(parent, ast.keyword) else parent
    if not isinstance(call, ast.Call) or program.dotted(call.func) not in _GRAY:
        return False
    return edits.argument(call, 2, "transform") is use


def _first_alone(program: Program, node: Optional[ast.expr]) -> Iterator[Edit]:
    """A list of three numbers as one of the first."""
    if not isinstance(node, (ast.Tuple, ast.List)) or len(node.elts) != 3:
        return
    if all(isinstance(constant(one), (int, float)) for one in node.elts):
        first = program.source.text_of(node.elts[0])
        text = f"({first},)" if isinstance(node, ast.Tuple) else f"[{first}]"
        yield edits.replace(program, node, text)


_DATA = (
    "import torchvision\nfrom torchvision import transforms\n\n\ndef digits(root):\n"
    "    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize(%s, %s)])\n"
    "    return torchvision.datasets.MNIST(root, transform=transform)\n"
)

RULES: list[Rule] = [
    Rule(
        "FLB1197", "three-channels-of-gray",
        "`Normalize` with three means raises for MNIST's images of one channel since torchvision 0.2.2: write one",
        "对 MNIST 等单通道图像使用三个均值的 `Normalize` 自 torchvision 0.2.2 起报错：只写一个",
        _DATA % ("(0.5, 0.5, 0.5)", "(0.5, 0.5, 0.5)"), _DATA % ("(0.5,)", "(0.5,)"),
        "Before, the numbers that had no channel were left out: the first alone gives the same images.",
        library="torchvision", removed="0.2.2", fix="safe", runs="RuntimeError",
        calls=(f"{_TRANSFORMS}Normalize",), check=_three_channels,
    ),
]  # fmt: skip
