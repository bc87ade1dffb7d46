"""Private names of torch: each use has a row in docs/en/private_apis.md, and torch has each of them."""

import ast
import functools
import importlib
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "flambeau"
PAGES = [ROOT / "docs" / language / "private_apis.md" for language in ("en", "zh")]


WEIGHT = nn.Parameter(torch.ones(2, 2))
ZEROS = torch.zeros(2, dtype=torch.long)


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))])


ATTRIBUTES: dict[str, Callable[[], Any]] = {  # of objects that torch makes, with one that has it
    "torch.nn.Module._buffers": nn.Module,
    "torch.nn.Module._forward_hooks": nn.Module,
    "torch.nn.Module._forward_pre_hooks": nn.Module,
    "torch.nn.Module._modules": nn.Module,
    "torch.nn.Module._parameters": nn.Module,
    "torch.nn.Module._non_persistent_buffers_set": nn.Module,
    "torch.nn.BatchNorm2d._check_input_dim": lambda: nn.BatchNorm2d(1),
    "torch.Tensor._version": lambda: torch.zeros(1),
    "torch.UntypedStorage._cdata": lambda: torch.zeros(1).untyped_storage(),
    "torch.optim.Optimizer._optimizer_step_pre_hooks": optimizer,
    "torch.optim.Optimizer._optimizer_step_post_hooks": optimizer,
    "torch.ops.aten.add.Tensor._schema": lambda: torch.ops.aten.add.Tensor,
    "torch.compile()._orig_mod": lambda: torch.compile(nn.Linear(1, 1)),
    "nn.Module.state_dict()._metadata": lambda: nn.Linear(1, 1).state_dict(),
    "SoftmaxBackward0._saved_dim": lambda: (WEIGHT @ WEIGHT).softmax(1).grad_fn,
    "ConvolutionBackward0._raw_saved_input": lambda: (
        F.conv2d(WEIGHT[None, None], WEIGHT[None, None]).grad_fn
    ),
    "AddmmBackward0._raw_saved_mat1": lambda: F.linear(WEIGHT, WEIGHT, WEIGHT[0]).grad_fn,
    "MmBackward0._raw_saved_self": lambda: (WEIGHT @ WEIGHT).grad_fn,
    "NllLossBackward0._raw_saved_target": lambda: F.nll_loss(WEIGHT, ZEROS).grad_fn,
    "NllLossBackward0._raw_saved_weight": lambda: F.nll_loss(WEIGHT, ZEROS).grad_fn,
    "Node._input_metadata": lambda: (WEIGHT @ WEIGHT).grad_fn,
    "iter(DataLoader)._workers_done_event": lambda: iter(DataLoader([1], num_workers=1)),  # type: ignore[arg-type]
    "iter(DataLoader)._workers_done_event._cond": lambda: (
        iter(DataLoader([1], num_workers=1))._workers_done_event  # type: ignore[arg-type,attr-defined]
    ),
}
BY_NAME = {full.rpartition(".")[2]: full for full in ATTRIBUTES}
PERHAPS = re.compile(rf"\b(import|from) torch\b|{'|'.join(map(re.escape, BY_NAME))}")


def is_private(part: str) -> bool:
    return part.startswith("_") and not part.startswith("__")


def up_to_private(full: str) -> str:
    """A name without what follows its last private part."""
    parts = full.split(".")
    last = max(number for number, part in enumerate(parts) if is_private(part))
    return ".".join(parts[: last + 1])


def dotted(node: ast.AST, roots: dict[str, str]) -> str | None:
    """The full name of a chain of attributes that begins with what was imported from torch."""
    if isinstance(node, ast.Name):
        return roots.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value, roots)
        return None if owner is None else f"{owner}.{node.attr}"
    return None


def imported(tree: ast.AST, found: set[str]) -> dict[str, str]:
    """What the names that a module imports from torch stand for; private ones are found."""
    roots: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(a.name, a.asname) for a in node.names if a.name.split(".")[0] == "torch"]
            roots |= {alias or "torch": full if alias else "torch" for full, alias in names}
            found |= {full for full, _ in names if any(map(is_private, full.split(".")))}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                roots[alias.asname or alias.name] = full
                if any(map(is_private, full.split("."))):
                    found.add(full)
    return roots


@functools.cache
def private_names(source: str) -> set[str]:
    """Those that a module uses."""
    found: set[str] = set()
    if not PERHAPS.search(source):  # 5 s of parsing less
        return found
    tree = ast.parse(source)
    roots = imported(tree, found)
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        owner: ast.AST | None = None
        if isinstance(node, ast.Attribute):
            owner, name = node.value, node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            owner, text = node.args[:2]
            name = text.value if isinstance(text, ast.Constant) else ""
        if owner is None:
            continue
        full = f"{dotted(owner, roots) or ''}.{name}"
        beyond_import = full.removeprefix(dotted(root_of(owner), roots) or "")
        if full[0] != "." and any(map(is_private, beyond_import.split("."))):
            if id(node) not in inner:
                found.add(up_to_private(full))
        elif name in BY_NAME and ast.unparse(owner) != "self":
            found.add(BY_NAME[name])
    return found


def root_of(node: ast.AST) -> ast.AST:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node


def uses() -> dict[str, set[str]]:
    """Files by private name."""
    files = defaultdict(set)
    for path in sorted(SRC.rglob("*.py")):
        for name in private_names(path.read_text()):
            files[name].add(path.relative_to(SRC).as_posix())
    return files


@functools.cache
def rows(page: Path) -> dict[str, tuple[set[str], str]]:
    """Files and reason by name, as the page's table has them."""
    found = {}
    for line in page.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 4:
            found[cells[0].strip("`")] = (set(re.findall(r"`([^`]+)`", cells[1])), cells[2])
    return found


@pytest.mark.parametrize("page", PAGES, ids=["en", "zh"])
def test_the_table_has_every_private_name_and_no_other(page: Path) -> None:
    used, listed = uses(), rows(page)
    differences = [
        f"{name}: used in {sorted(used.get(name, ()))}, listed with {sorted(files) or 'no file'}"
        for name in sorted(used.keys() | listed.keys())
        for files in [listed[name][0] if name in listed else set()]
        if used.get(name, set()) != files
    ]
    assert not differences, f"{page.relative_to(ROOT)} is not up to date:\n" + "\n".join(
        differences
    )
    assert all(reason for _, reason in listed.values())


# Of torch 2.11, in its own torch.compile.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", sorted(rows(PAGES[0])))
def test_the_installed_torch_has_it(name: str) -> None:
    files, reason = rows(PAGES[0])[name]
    message = f"torch {torch.__version__} has no {name} any more; {sorted(files)} need it: {reason}"
    if name in ATTRIBUTES:
        assert hasattr(ATTRIBUTES[name](), name.rpartition(".")[2]), message
        return
    owner: Any = torch
    for number, part in enumerate(name.split(".")[1:], start=2):
        try:
            owner = importlib.import_module(".".join(name.split(".")[:number]))
        except ImportError:
            assert hasattr(owner, part), message
            owner = getattr(owner, part)


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import torch\ntorch._foreach_add_(a, b)", {"torch._foreach_add_"}),
        ("import torch\ntorch._C._autograd.f()", {"torch._C._autograd"}),
        ("from torch.utils._pytree import tree_map\ntree_map.x", {"torch.utils._pytree.tree_map"}),
        ("import torch.nn._x as x", {"torch.nn._x"}),
        ("from torch import optim\ngetattr(optim, '_f')", {"torch.optim._f"}),
        ("t._version", {"torch.Tensor._version"}),
        ("import torch\nself._version\ntorch.nn.Linear.__call__", set()),
    ],
)
def test_private_names_are_found(source: str, names: set[str]) -> None:
    assert private_names(source) == names
