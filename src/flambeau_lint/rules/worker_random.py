"""NumPy's global generator in the workers of a DataLoader: torch seeds it in each of them since 1.9."""

import ast
from collections.abc import Iterator

from flambeau_lint import edits
from flambeau_lint.program import Function, Program, once
from flambeau_lint.renaming import finding
from flambeau_lint.rule import Finding, Rule
from flambeau_lint.rules.argument_rows import constant

_DATASETS = ("torch.utils.data.Dataset", "torch.utils.data.dataset.Dataset")
_LOADERS = ("torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader")


def _drawn_by_workers(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """np.random.rand() of a Dataset, or of a collate_fn, where nothing seeds the workers."""
    assert isinstance(node, ast.Call)
    if program.says(b"worker_init_fn") or not _may_have_workers(program):
        return
    if _is_run_by_workers(program, node, set()):
        yield finding(program, rule, node.func)


@once
def _may_have_workers(program: Program) -> bool:
    """Unless all loaders of the file say that they have none."""
    loaders = [call for call in program.calls if program.dotted(call.func) in _LOADERS]
    return not loaders or any(_has_workers(call) for call in loaders)


def _has_workers(call: ast.Call) -> bool:
    count = edits.argument(call, 5, "num_workers")
    return edits.is_open(call) if count is None else constant(count) != 0


def _is_run_by_workers(program: Program, node: ast.AST, seen: "set[ast.AST]") -> bool:
    """Whether `__getitem__` or a collate_fn holds a node, or calls the function that does.

    An IterableDataset is left out: it is often iterated without a DataLoader.
    """
    function = program.function_of(node)
    if not isinstance(function, Function) or function in seen:
        return False
    seen.add(function)
    owner = program.parents.get(function)
    uses: list[ast.AST] = []
    if isinstance(owner, ast.ClassDef):
        if not _is_dataset(program, owner):
            return False
        if function.name == "__getitem__":
            return True
        same = program.attributes_by_class(function.name).get(owner, ())
        uses += [one for one in same if _is_of_self(one)]
    elif owner is program.tree:
        uses += program.loads.get(function.name, ())
        if any(_is_collate(program, one) for one in uses):
            return True
    return any(program.is_called(one) and _is_run_by_workers(program, one, seen) for one in uses)


def _is_of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "self"


def _is_collate(program: Program, node: ast.AST) -> bool:
    keyword = program.parents.get(node)
    call = program.parents.get(keyword) if isinstance(keyword, ast.keyword) else None
    is_given = isinstance(keyword, ast.keyword) and keyword.arg == "collate_fn"
    return is_given and isinstance(call, ast.Call) and program.dotted(call.func) in _LOADERS


def _is_dataset(program: Program, node: ast.ClassDef) -> bool:
    """Whether a class derives from a Dataset of torch or torchvision, by classes of this file or directly."""
    for base in node.bases:
        dotted = program.dotted(base)
        if dotted in _DATASETS or dotted.startswith("torchvision.datasets."):
            return True
        found = program.bindings(base.id, base) if isinstance(base, ast.Name) else []
        above = found[0] if len(found) == 1 else None
        is_class = isinstance(above, ast.ClassDef) and above.lineno < node.lineno
        if is_class and _is_dataset(program, above):  # type: ignore[arg-type]
            return True
    return False


_NOISE = (
    "import numpy as np\nimport torch\nfrom torch.utils.data import DataLoader, Dataset\n\n\n"
    "class Noise(Dataset):\n    def __len__(self):\n        return 4\n\n"
    "    def __getitem__(self, index):\n        return %s\n\n\n"
    "loader = DataLoader(Noise(), num_workers=2)\n"
)
_BAD = _NOISE % "torch.tensor(np.random.rand())"
_GOOD = _NOISE % "torch.rand(())"
_COMMON = ("rand", "randn", "randint", "random", "random_sample", "choice", "permutation")
_OTHERS = ("shuffle", "uniform", "normal", "standard_normal", "beta", "binomial", "poisson")
_CALLS = tuple(f"numpy.random.{name}" for name in (*_COMMON, *_OTHERS))

RULES: list[Rule] = [
    Rule(
        "FLB325", "numpy-seeded-in-workers",
        "`np.random` in a Dataset gives each worker numbers of its own since torch 1.9, and gave all of them the same"
        " before",
        "Dataset 中的 `np.random` 自 torch 1.9 起在各数据加载进程中各不相同，此前都相同",
        _BAD, _GOOD,
        "Augmentation is more varied than it was: results of older runs were of fewer different images.",
        changed="1.9", sure="likely", calls=_CALLS, check=_drawn_by_workers,
    ),
    Rule(
        "FLB462", "numpy-random-in-workers",
        "before torch 1.9, `np.random` in a Dataset gives the same numbers to all workers, in each epoch: draw by"
        " `torch`, or seed NumPy in `worker_init_fn`",
        "在 torch 1.9 之前，Dataset 中的 `np.random` 在所有数据加载进程、每个 epoch 中都给出相同的数：用 `torch` 抽取，"
        "或在 `worker_init_fn` 中为 NumPy 设种子",
        _BAD, _GOOD,
        "Each worker is a copy of the main process, state of NumPy's generator included; torch seeds its own generator"
        " and Python's in each of them, and NumPy's since 1.9.",
        until="1.9", sure="likely", calls=_CALLS, check=_drawn_by_workers,
    ),
]  # fmt: skip
"""What torch 1.9 changed, for who comes from before it and for who stays there."""
