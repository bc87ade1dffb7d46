#!/usr/bin/env python
"""The rules of the source tree as data: who may import what, what a file may hold, what pages may show.

    python tools/check_house.py

Prints each breach with its file and ends with 1 if there is one; tests/test_architecture.py calls it.

A check is a function of (path below src/flambeau, source) that yields the breaches as sentences.
The same function judges the package and the small bad sources that prove that it can fail.
"""

import argparse
import ast
import dataclasses
import functools
import re
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src" / "flambeau"
LINT = ROOT / "src" / "flambeau_lint"  # a package of its own, which runs without torch
FILES = sorted(PurePosixPath(path.relative_to(SRC)) for path in SRC.rglob("*.py"))
RECIPES = [path for path in FILES if path.parts[0] == "recipes" and path.stem != "__init__"]

# The doors of the package; a class stands for its __init__.
DOORS = {"Run", "fast", "wrap", "train", "_train", "load", "evaluate", "export", "sweep"}

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

IMPORT_NAMES = {"pillow": "PIL"}  # where the name to install is not the name to import


@functools.lru_cache(maxsize=8)  # file by file, all rules look at one
def parsed(source: str) -> ast.Module:
    """The tree of a source; nobody changes it."""
    return ast.parse(source)


@functools.lru_cache(maxsize=8)
def nodes_by_kind(source: str) -> dict[type[ast.AST], list[Any]]:
    found: dict[type[ast.AST], list[Any]] = defaultdict(list)
    for node in ast.walk(parsed(source)):
        found[type(node)].append(node)
    return found


def nodes(source: str, *kinds: type[ast.AST]) -> list[Any]:
    """Those of these kinds, kind by kind."""
    found = nodes_by_kind(source)
    return [node for kind in kinds for node in found.get(kind, ())]


def required_packages() -> frozenset[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = [re.split(r"[<>=!~;\[ ]", line)[0] for line in project["dependencies"]]
    return frozenset(IMPORT_NAMES.get(name, name.replace("-", "_")) for name in names)


REQUIRED = required_packages()
EVERYTHING = frozenset(
    {
        "version",
        "errors",
        "optional_packages",
        "file_signature",
        "regular_file",
        "unfinished_file",
        "user_code",
        "provenance",
        "terminal",
        "html_table",
        "sandbox",
        "recipes",
        "report",
        "images",
        "data",
        "parallel",
        "run",
        "weights",
        "trainer",
        "compare",
        "inspection",
        "exports",
        "experiments",
        "tune",
        "cli",
    }
)


BELOW_RUN = EVERYTHING - {
    "run",
    "weights",
    "trainer",
    "compare",
    "inspection",
    "exports",
    "experiments",
    "tune",
    "cli",
}
BELOW_TRAINER = BELOW_RUN | {"run", "weights"}


@dataclass(frozen=True)
class Floor:
    """What the files of one folder may import.

    Inside a function any package of others may be imported.
    """

    flambeau: frozenset[str]  # folders of flambeau
    packages: frozenset[str] = REQUIRED  # packages of others, at module level
    light: bool = False  # at module level, only what reaches no package of others


FLOORS = {
    "version.py": Floor(frozenset(), packages=frozenset()),
    "errors.py": Floor(frozenset(), packages=frozenset()),
    "optional_packages.py": Floor(frozenset({"errors"}), packages=frozenset()),
    "file_signature.py": Floor(frozenset(), packages=frozenset()),
    "regular_file.py": Floor(frozenset(), packages=frozenset()),
    "unfinished_file.py": Floor(frozenset(), packages=frozenset()),
    "user_code.py": Floor(frozenset({"errors", "recipes"})),
    "provenance.py": Floor(frozenset({"errors"}), packages=frozenset()),
    "terminal.py": Floor(frozenset()),
    "html_table.py": Floor(frozenset(), packages=frozenset()),
    "sandbox": Floor(frozenset({"errors", "sandbox"}), packages=frozenset()),
    "recipes": Floor(frozenset(), packages=frozenset({"torch"})),
    "report": Floor(frozenset({"terminal", "report"}), packages=frozenset()),
    "images": Floor(
        frozenset({"errors", "optional_packages", "file_signature", "recipes", "images"})
    ),
    "data": Floor(
        frozenset(
            {
                "errors",
                "optional_packages",
                "file_signature",
                "regular_file",
                "unfinished_file",
                "user_code",
                "terminal",
                "recipes",
                "images",
                "data",
            }
        )
    ),
    "parallel": Floor(
        frozenset(
            {"errors", "file_signature", "user_code", "terminal", "recipes", "data", "parallel"}
        )
    ),
    "run": Floor(BELOW_RUN | {"run"}),
    "weights": Floor(BELOW_RUN | {"run", "weights"}),
    "trainer": Floor(BELOW_TRAINER | {"trainer"}),
    "compare": Floor(BELOW_TRAINER | {"trainer", "compare"}),
    "inspection": Floor(BELOW_TRAINER | {"trainer", "compare", "inspection"}),
    "exports": Floor(BELOW_TRAINER | {"trainer", "exports"}),
    "experiments": Floor(BELOW_TRAINER | {"trainer", "experiments"}),
    "tune": Floor(BELOW_TRAINER | {"trainer", "inspection", "tune"}),
    "cli": Floor(EVERYTHING, packages=frozenset(), light=True),
    "__main__.py": Floor(frozenset({"cli"}), packages=frozenset(), light=True),
}

# Within a folder: what stands on a storey may import its own sub-folder and the storeys above it here.
STOREYS = {
    "data": [
        {"loading", "stores"},
        {"sources", "transforms"},
        {"pack", "datasets"},
        {"check", "drop_in"},
        {"wrap.py", "fast.py"},
    ],
    "parallel": [
        {
            "network_interface.py",
            "preemption.py",
            "shard_layout.py",
            "watchdog",
        },
        {"ranks.py", "launcher"},
        {"gradient_sync"},
    ],
    "run": [
        {"options"},
        {"folder"},
        {"trackers"},
        {"loop"},
        {"run.py"},
    ],
    "trainer": [
        {"settings"},
        {"evaluation"},
        {"tasks"},
        {"parts"},
        {"prediction", "verify_run.py"},
        {"loss.py", "report_data.py"},
        {"fit.py"},
        {"trial_training.py"},
        {"dry_run.py", "find_lr.py", "replay_nan_step.py"},
        {"start.py"},
        {"api.py", "soup.py"},
    ],
    "inspection": [
        {
            "model_catalog.py",
            "operation_check.py",
            "receptive_field.py",
            "watched_forward.py",
        },
        {"named_model.py", "model_summary.py", "graph_breaks.py"},
        {"graphs"},
    ],
    "experiments": [
        {"space.py", "spread.py", "plan.py", "claim.py", "trained_value.py"},
        {"job.py"},
        {"proposals.py", "sweep_folder.py", "worker_main.py", "worker_handle.py"},
        {"optuna_log.py"},
        {"sweeper.py"},
        {"importance.py"},
        {"result.py", "description.py"},
        {"out_of_fold.py", "sweep_reader.py", "estimate.py"},
        {"api.py"},
    ],
    "tune": [{"watch"}, {"doctor"}, {"step", "search", "learning"}],
}

BANNED_NAMES = {"util", "utils", "helper", "helpers", "common", "misc", "base"}

FUNCTION_LINES = 60  # of its body, without the docstring
ARGUMENTS = 10  # of a function that is no door; `self` does not count
FORMAT_SKIPS = 20  # in src/, tools/ and examples/ together

# Calls that change the process; a bare call is refused anyway, these also as the value of a name.
EFFECTS = re.compile(
    r"(\w+\.)*(print|seed|manual_seed\w*|basicConfig|filterwarnings|simplefilter|putenv|setdefault"
    r"|register|(?<=signal\.)signal|set_\w+|use_deterministic_algorithms|enable_\w+|init_process_group)"
)
CJK = re.compile(r"[\u4e00-\u9fff]")


# ---------------------------------------------------------------- imports


class Import(NamedTuple):
    target: str  # 'torch.nn', 'flambeau.data', 'flambeau' ...
    line: int
    lazy: bool  # inside a function, or under TYPE_CHECKING: it does not run at import


@functools.cache
def imports(path: PurePosixPath, source: str) -> list[Import]:
    package = ("flambeau", *path.parent.parts)
    lazy = [span(node, node) for node in nodes(source, *FUNCTIONS, ast.Lambda)]
    for node in nodes(source, ast.If):
        if "TYPE_CHECKING" in names_in(node.test):
            lazy.append(span(node.body[0], node.body[-1]))
    found = []
    for node in nodes(source, ast.Import, ast.ImportFrom, ast.Call):
        for target in import_targets(node, package):
            start, end = span(node, node)
            inside = any(first <= start and end <= last for first, last in lazy)
            found.append(Import(target, node.lineno, inside))
    return found


def span(first: Any, last: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    """Line and column where they begin and end."""
    return (first.lineno, first.col_offset), (last.end_lineno, last.end_col_offset)


def import_targets(node: ast.AST, package: tuple[str, ...]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
        module = ".".join(part for part in (base, node.module) if part)
        return [f"{module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and dotted(node.func).endswith(("import_module", "__import__")):
        return [arg.value for arg in node.args[:1] if is_string(arg)]
    return []


def import_breaches(path: PurePosixPath, source: str) -> Iterator[str]:
    if path.name == "__init__.py":
        return  # init_breaches lets it hold no import at all
    if path.parts[0] not in FLOORS:
        yield f"{path.parts[0]} is not in the table of FLOORS"
        return
    rule = FLOORS[path.parts[0]]
    for target, line, lazy in imports(path, source):
        package, _, rest = target.partition(".")
        folder = rest.partition(".")[0]
        if package in sys.stdlib_module_names:
            continue
        where = "imports" if lazy else "imports at module level"
        if package == "flambeau":
            breach = folder not in rule.flambeau
            behind = packages_behind(target) if rule.light and not lazy else set()
            if behind and not breach:
                yield f"line {line}: {path.parts[0]} {where} {target}, which imports {min(behind)}"
        else:
            breach = not lazy and package not in rule.packages
        if breach:
            yield f"line {line}: {path.parts[0]} {where} {target}"


def storey_breaches(path: PurePosixPath, source: str) -> Iterator[str]:
    """Sub-folders import downwards; lazy imports and those for type checkers count."""
    storeys = STOREYS.get(path.parts[0])
    if storeys is None or path.name == "__init__.py":
        return
    floor_of = {name: number for number, names in enumerate(storeys) for name in names}
    if path.parts[1] not in floor_of:
        yield f"{path.parts[1]} is not in the table of STOREYS"
        return
    for target, line, _ in imports(path, source):
        parts = target.split(".")
        if parts[:2] != ["flambeau", path.parts[0]] or len(parts) < 3:
            continue
        room = parts[2] if parts[2] in floor_of else f"{parts[2]}.py"
        if room != path.parts[1] and floor_of.get(room, 99) >= floor_of[path.parts[1]]:
            yield f"line {line}: {path.parts[1]} imports {room}, which is not below it"


def private_breaches(path: PurePosixPath, source: str) -> Iterator[str]:
    """What another module uses is public there."""
    modules: set[str] = set()  # names that stand for modules of flambeau here
    for node in nodes(source, ast.ImportFrom):
        if (node.module or "").startswith("flambeau"):
            for alias in node.names:
                if is_private(alias.name):
                    yield f"line {node.lineno}: {alias.name} is private to {node.module}"
                place = SRC.joinpath(*(node.module or "").split(".")[1:], alias.name)
                if place.with_suffix(".py").is_file():
                    modules.add(alias.asname or alias.name)
    for node in nodes(source, ast.Attribute):
        if is_private(node.attr) and dotted(node.value) in modules:
            yield f"line {node.lineno}: {node.attr} is private to {dotted(node.value)}"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def circles(sources: Mapping[PurePosixPath, str]) -> list[list[str]]:
    """Modules that import each other, also lazily or for type checkers alone."""
    modules = {
        ".".join(("flambeau", *path.with_suffix("").parts)).removesuffix(".__init__"): path
        for path in sources
    }
    arrows: dict[str, set[str]] = {}
    for module, path in modules.items():
        found = {row.target for row in imports(path, sources[path])}
        # 'flambeau.a.b.Name' names the module flambeau.a.b.
        arrows[module] = {
            name
            for target in found
            for name in (target, target.rpartition(".")[0])
            if name in modules and name != module
        }
    while leaves_ := {m for m, targets in arrows.items() if not targets}:
        arrows = {m: targets - leaves_ for m, targets in arrows.items() if m not in leaves_}
    # What is left either is in a circle or stands above one.
    reach = {module: reachable(module, arrows) for module in arrows}
    rings = {frozenset(o for o in reach[m] if m in reach[o]) for m in arrows if m in reach[m]}
    return sorted(sorted(ring) for ring in rings)


def reachable(module: str, arrows: Mapping[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    todo = [module]
    while todo:
        for target in arrows[todo.pop()] - seen:
            seen.add(target)
            todo.append(target)
    return seen


def packages_behind(target: str) -> set[str]:
    """The packages of others that importing a module of flambeau imports too."""
    todo = [target]
    seen = set()
    packages = set()
    while todo:
        parts = todo.pop().split(".")[1:]
        places = [SRC.joinpath(*parts[:depth]) for depth in range(len(parts), 0, -1)]
        files = [place.with_suffix(".py") for place in places]
        found = next((file for file in files if file.is_file()), None)
        if found is None or found in seen:
            continue  # a package, whose __init__.py imports nothing
        seen.add(found)
        source = found.read_text(encoding="utf-8")
        eager = [
            row.target
            for row in imports(PurePosixPath(found.relative_to(SRC)), source)
            if not row.lazy
        ]
        todo += [name for name in eager if name.startswith("flambeau.")]
        packages |= {name.partition(".")[0] for name in eager} - {"flambeau"}
    return packages - sys.stdlib_module_names


# ---------------------------------------------------------------- what a module holds


AT_START = PurePosixPath("tune/watch/startup/sitecustomize.py")  # Python runs it before a script


def init_breaches(path: PurePosixPath, source: str) -> Iterator[str]:
    """`__init__.py` is a docstring; the root's imports the version alone, and resolves its names lazily."""
    if path.name != "__init__.py":
        return
    if path == PurePosixPath("__init__.py"):
        for target, line, lazy in imports(path, source):
            package = target.partition(".")[0]
            if not lazy and package not in sys.stdlib_module_names and "version" not in target:
                yield f"line {line}: imports {target} at module level"
        return
    for number, node in enumerate(parsed(source).body):
        if number or not isinstance(node, ast.Expr) or not is_string(node.value):
            yield f"line {node.lineno}: __init__.py holds more than its docstring"


def effect_breaches(path: PurePosixPath, source: str) -> Iterator[str]:
    """Importing a module defines names and does nothing else."""
    if path not in (PurePosixPath("__main__.py"), AT_START):
        yield from effects(parsed(source).body)


def effects(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and is_constant(node.value)):
            continue
        if isinstance(node, ast.ClassDef):
            yield from effects(node.body)
        elif isinstance(node, ast.If):
            yield from effects([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            handlers = [line for handler in node.handlers for line in handler.body]
            yield from effects([*node.body, *handlers, *node.orelse, *node.finalbody])
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for leaf in (leaf for target in targets for leaf in leaves(target)):
                if not isinstance(leaf, ast.Name):
                    yield f"line {node.lineno}: sets {ast.unparse(leaf)} at import"
            for call in ast.walk(node):
                if isinstance(call, ast.Call) and EFFECTS.fullmatch(dotted(call.func)):
                    yield f"line {node.lineno}: calls {dotted(call.func)} at import"
        elif not (sys.version_info >= (3, 12) and isinstance(node, ast.TypeAlias)):
            yield f"line {node.lineno}: runs `{ast.unparse(node).splitlines()[0]}` at import"


def call_breaches(path: PurePosixPath, source: str) -> Iterator[str]:
    """The device follows the input; a recipe returns what it has to say."""
    for node in nodes(source, ast.Call):
        if isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
            yield f"line {node.lineno}: calls .cuda()"
        if dotted(node.func) == "print" and str(path) not in ("terminal.py", "cli/table.py"):
            yield f"line {node.lineno}: prints by itself; say and print_text of terminal.py escape names"


# ---------------------------------------------------------------- words, names and lengths


def docstring_breaches(path: PurePosixPath, source: str) -> Iterator[str]:
    tree = parsed(source)
    docstring = ast.get_docstring(tree)
    if not docstring:
        yield "no module docstring"
        return
    if path.parts[0] != "recipes" or path.name == "__init__.py":
        return
    english, *rest = docstring.split("\n\n")
    if "\n" in english or CJK.search(english):
        yield "the docstring does not begin with one English line and a blank line"
    if not rest or "\n" in rest[0] or not CJK.search(rest[0]):
        yield "the second paragraph of the docstring is not the same line in Chinese"
    if not re.search(r"^Source: \S", docstring, re.MULTILINE):
        yield "the docstring has no line 'Source: ...'"
    for node in tree.body:
        is_public = isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_"
        if is_public and not is_record(node) and ">>> " not in (ast.get_docstring(node) or ""):
            yield f"line {node.lineno}: {node.name} has no example in its docstring"


def is_record(node: ast.AST) -> bool:
    """An exception, a protocol or a bundle of fields: its users show it."""
    if not isinstance(node, ast.ClassDef):
        return False
    words = {dotted(part).rpartition(".")[2] for part in node.bases}
    words |= {name for decorator in node.decorator_list for name in names_in(decorator)}
    return any(re.fullmatch(r"\w*(Error|Exception|Warning)", word) for word in words) or bool(
        words & {"Protocol", "NamedTuple", "TypedDict", "Enum", "dataclass"}
    )


def name_breaches(path: PurePosixPath, source: str = "") -> Iterator[str]:
    """A copied `profile.py` breaks cProfile; a copied `torch.py` breaks everything."""
    for part in (*path.parts[:-1], path.stem):
        if part in ("__init__", "__main__"):
            continue
        if part in sys.stdlib_module_names or part in REQUIRED:
            yield f"{part!r} is the name of an installed module"
        if part in BANNED_NAMES:
            yield f"{part!r} says nothing about what is inside"


def length_breaches(path: PurePosixPath, source: str) -> Iterator[str]:
    """A file is as long as its idea, a function is not."""
    for node in nodes(source, *FUNCTIONS):
        length = code_lines(node)
        if length > FUNCTION_LINES:
            yield f"line {node.lineno}: {node.name} has {length} lines, the limit is {FUNCTION_LINES}"


def argument_breaches(path: PurePosixPath, source: str) -> Iterator[str]:
    """What belongs together is one frozen dataclass, whose own fields do not count; doors have no limit."""
    for name, line, count in wide(source):
        if name not in DOORS:
            yield f"line {line}: {name} takes {count} arguments, the limit is {ARGUMENTS}"


def packing_breaches(path: PurePosixPath, source: str) -> Iterator[str]:
    """One statement a line: `a, b = x, y` is for values that are alike or depend on each other."""
    for node in nodes(source, ast.Assign):
        if not isinstance(node.value, ast.Tuple):
            continue
        (target, *others), values = node.targets, node.value.elts
        if others or not isinstance(target, ast.Tuple) or len(target.elts) != len(values):
            continue
        has_star = any(isinstance(part, ast.Starred) for part in (*target.elts, *values))
        if not has_star and not are_related(target.elts, values):
            yield f"line {node.lineno}: packs unrelated values into one statement"


def are_related(targets: list[ast.expr], values: list[ast.expr]) -> bool:
    """Whether some value is made of a target, as in a swap, or all values are of one form."""
    read = {
        ast.unparse(part)
        for value in values
        for part in ast.walk(value)
        if isinstance(part, ast.Name | ast.Attribute | ast.Subscript)
    }
    if not read.isdisjoint(ast.unparse(target) for target in targets):
        return True
    return len({form(value) for value in values}) == 1


def form(value: ast.expr) -> tuple[str, ...]:
    """What makes values alike: literals of one kind, calls of one function, parts of one object."""
    if isinstance(value, ast.UnaryOp):
        value = value.operand
    if isinstance(value, ast.Constant):
        is_number = isinstance(value.value, int | float) and not isinstance(value.value, bool)
        return ("constant", "number" if is_number else type(value.value).__name__)
    if isinstance(value, ast.Call):
        return ("call", ast.dump(value.func))
    if isinstance(value, ast.Attribute | ast.Subscript):
        return (type(value).__name__, ast.dump(value.value))
    if isinstance(value, ast.Name | ast.List | ast.Dict | ast.Tuple | ast.Set):
        return (type(value).__name__,)
    return (ast.dump(value),)


def wide(source: str) -> Iterator[tuple[str, int, int]]:
    """(name, line, number of arguments) of what takes too many."""
    class_of = {
        id(node): owner.name for owner in nodes(source, ast.ClassDef) for node in owner.body
    }
    for node in nodes(source, *FUNCTIONS):
        args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        count = sum(arg.arg not in ("self", "cls") for arg in args)
        if count > ARGUMENTS:
            name = class_of.get(id(node), "") if node.name == "__init__" else node.name
            yield name, node.lineno, count


def code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The lines of its body without the docstring."""
    body = node.body
    first = body[0]
    if isinstance(first, ast.Expr) and is_string(first.value):
        body = body[1:]
    if not body:
        return 0
    assert node.end_lineno is not None
    return node.end_lineno - body[0].lineno + 1


# ---------------------------------------------------------------- reading a tree


def dotted(node: ast.AST) -> str:
    """'os.environ.get' for such a chain of names; '' for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


def names_in(node: ast.AST) -> set[str]:
    return {dotted(part).rpartition(".")[2] for part in ast.walk(node)}


def leaves(target: ast.expr) -> list[ast.expr]:
    """The parts of `a, (b.c, *d) = ...`."""
    if isinstance(target, ast.Starred):
        return leaves(target.value)
    if isinstance(target, ast.Tuple | ast.List):
        return [leaf for part in target.elts for leaf in leaves(part)]
    return [target]


def is_constant(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant)


def is_string(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


CHECKS = [
    import_breaches,
    storey_breaches,
    private_breaches,
    init_breaches,
    effect_breaches,
    call_breaches,
    docstring_breaches,
    name_breaches,
    length_breaches,
    argument_breaches,
    packing_breaches,
]


def breaches(path: PurePosixPath, source: str) -> list[str]:
    return [breach for check in CHECKS for breach in check(path, source)]


def lint_import_breaches(path: PurePosixPath, source: str) -> Iterator[str]:
    """The linter imports the standard library and itself: it is installed without anything else.

    Its language server, which only `--server` imports, is written on pygls.
    """
    known = sys.stdlib_module_names | {"flambeau_lint"}
    known |= {"pygls", "lsprotocol"} if path == PurePosixPath("server.py") else set()
    for target, line, _ in imports(path, source):
        if target.partition(".")[0] not in known:
            yield f"line {line}: flambeau_lint imports {target}"


LINT_CHECKS = [
    lint_import_breaches,
    private_breaches,
    effect_breaches,
    call_breaches,
    docstring_breaches,
    name_breaches,
    length_breaches,
    argument_breaches,
    packing_breaches,
]


def lint_breaches(path: PurePosixPath, source: str) -> list[str]:
    return [breach for check in LINT_CHECKS for breach in check(path, source)]


# ---------------------------------------------------------------- the package as a whole


def package_breaches() -> Iterator[str]:
    """Every breach in src/flambeau, its tests and its pages, as 'file: sentence'."""
    sources = {path: (SRC / path).read_text(encoding="utf-8") for path in FILES}
    for path, source in sources.items():
        yield from (f"src/flambeau/{path}: {breach}" for breach in breaches(path, source))
    for file in sorted(LINT.rglob("*.py")):
        path = PurePosixPath(file.relative_to(LINT))
        found = lint_breaches(path, file.read_text(encoding="utf-8"))
        yield from (f"src/flambeau_lint/{path}: {breach}" for breach in found)
    yield from (f"import circle: {' -> '.join(ring)}" for ring in circles(sources))
    yield from recipe_breaches()
    yield from table_breaches()
    yield from page_breaches()
    yield from format_breaches()
    # Python puts a script's own folder first on sys.path.
    for script in (*(ROOT / "bench").glob("*.py"), *(ROOT / "examples").glob("*.py")):
        where = script.relative_to(ROOT)
        yield from (f"{where}: {b}" for b in name_breaches(PurePosixPath(script.name)))
    for folder in {path.parent for path in FILES}:
        if not (SRC / folder / "__init__.py").is_file():
            yield f"src/flambeau/{folder}: no __init__.py"


def recipe_breaches() -> Iterator[str]:
    """A recipe has its test and its pages, and a name of its own."""
    for recipe in RECIPES:
        test = ROOT / "tests" / recipe.parent / f"test_{recipe.name}"
        pages = [ROOT / "docs" / lang / "recipes" / f"{recipe.stem}.md" for lang in ("en", "zh")]
        for path in (test, *pages):
            if not path.is_file():
                yield f"{path.relative_to(ROOT)}: missing"
    stems = [recipe.stem for recipe in RECIPES]
    for page in (ROOT / "docs" / "en" / "recipes").glob("*.md"):
        if page.stem not in stems:
            yield f"{page.relative_to(ROOT)}: there is no such recipe"
    tests = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    for names in (stems, tests):
        for name, count in Counter(names).items():
            if count > 1:
                yield f"{name}: {count} files have this name"


def public_names() -> frozenset[str]:
    """`flambeau.__all__`, and the recipes."""
    for node in parsed((SRC / "__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and dotted(node.targets[0]) == "__all__":
            return frozenset({*ast.literal_eval(node.value), "recipes"})
    raise AssertionError("flambeau has no __all__")


PUBLIC = public_names()
PRIVATE = frozenset(path.with_suffix("").parts[0] for path in FILES) - PUBLIC
SECTION = {"en": "What each command and flag is for", "zh": "每个命令和参数的用途"}


def text_breaches(text: str) -> Iterator[str]:
    """What users read and copy names public things alone, in prose and in strings too."""
    for match in re.finditer(r"\bflambeau\.(\w+)", text):
        if match[1] in PRIVATE:
            yield f"line {line_at(text, match)}: {match[0]} is private"
    for match in re.finditer(r"\bfrom flambeau import +(\([^)]*\)|[\w ,]+)", text):
        names = [part.split()[0] for part in match[1].strip("()").split(",") if part.strip()]
        for name in names:
            if name not in PUBLIC:
                yield f"line {line_at(text, match)}: flambeau.{name} is private"


def line_at(text: str, match: re.Match[str]) -> int:
    return text.count("\n", 0, match.start()) + 1


def page_breaches() -> Iterator[str]:
    """The rules of the pages, the README and the examples."""
    pages = [
        *(ROOT / "docs").rglob("*.md"),
        *ROOT.glob("README*.md"),
        *ROOT.glob("CONTRIBUTING*.md"),
    ]
    for page in sorted([*pages, *(ROOT / "examples").glob("*.py")]):
        text = page.read_text(encoding="utf-8")
        yield from (f"{page.relative_to(ROOT)}: {breach}" for breach in text_breaches(text))
    flags = command_flags()
    for language, heading in SECTION.items():
        page = ROOT / "docs" / language / "design.md"
        section = page.read_text(encoding="utf-8").partition(f"## {heading}\n")[2]
        found = command_breaches(section.partition("\n## ")[0], flags)
        yield from (f"{page.relative_to(ROOT)}: {breach}" for breach in found)


def command_flags() -> dict[str, set[str]]:
    """What each command takes: its flags, without --help and the settings of train, and its actions."""
    sys.path.insert(0, str(SRC.parent))
    from flambeau.cli.command import build_parser
    from flambeau.trainer.settings.settings import Settings

    sys.path.remove(str(SRC.parent))
    settings = {field.name for field in dataclasses.fields(Settings)}
    found: dict[str, set[str]] = {}
    todo: list[tuple[str, argparse.ArgumentParser]] = [("", build_parser())]
    for command, parser in todo:
        words = found.setdefault(command, set())
        for action in parser._actions:
            is_setting = command == "train" and action.dest in settings
            if isinstance(action, argparse._SubParsersAction):
                todo += [(command or name, child) for name, child in action.choices.items()]
                words |= set(action.choices) if command else set()
            elif action.option_strings and action.dest != "help" and not is_setting:
                words.add(action.option_strings[0])
    return found


def command_breaches(section: str, flags: Mapping[str, set[str]]) -> Iterator[str]:
    """Each command has a row that names its flags; a flag of several may have a row of its own."""
    shared: dict[str, set[str]] = {}
    rows: dict[str, set[str]] = {}
    for line in filter(re.compile(r"\| `").match, section.splitlines()):
        name, *cells = [re.findall(r"`([^`]+)`", cell) for cell in line.strip("|").split("|")]
        if name[0].startswith("--"):
            shared[name[0]] = set(cells[0])
        else:
            actions = {word for word in cells[0] if not word.startswith("--")}
            rows[name[0].removeprefix("flambeau").strip()] = actions | set(cells[1])
    for command in sorted(flags.keys() | rows.keys()):
        if command not in rows:
            yield f"`flambeau {command}` has no row"
            continue
        if command not in flags:
            yield f"`flambeau {command}` has a row and is no command"
            continue
        of_several = {flag for flag, commands in shared.items() if command in commands}
        yield from (
            f"`flambeau {command}`: nothing says what {word} is for"
            for word in sorted(flags[command] - of_several - rows[command])
        )
        named = {word for word in rows[command] if word.startswith("--")} | of_several
        yield from (
            f"`flambeau {command}` has no {word}" for word in sorted(named - flags[command])
        )


def table_breaches() -> Iterator[str]:
    """The tables name what exists."""
    for name in FLOORS:
        if not (SRC / name).exists():
            yield f"FLOORS names {name}, which does not exist"
    for folder, storeys in STOREYS.items():
        for name in set().union(*storeys):
            if not (SRC / folder / name).exists():
                yield f"STOREYS names {folder}/{name}, which does not exist"


def format_breaches() -> Iterator[str]:
    """`# fmt: skip` is for tables alone, below a comment that says what the lines show."""
    files = [*SRC.rglob("*.py"), *(ROOT / "tools").glob("*.py"), *(ROOT / "examples").glob("*.py")]
    skips = []
    for file in sorted(files):
        lines = file.read_text(encoding="utf-8").splitlines()
        ends = [number for number, line in enumerate(lines, 1) if line.endswith("# fmt: skip")]
        skips += [(file, end) for end in ends]
        for node in ast.walk(parsed("\n".join(lines))) if ends else ():
            is_table = isinstance(node, ast.stmt) and node.end_lineno in ends
            if is_table and not lines[node.lineno - 2].startswith("#"):
                where = f"{file.relative_to(ROOT)}: line {node.lineno}"
                yield f"{where}: a table that is not formatted needs a comment that says why"
    if len(skips) > FORMAT_SKIPS:
        yield f"{len(skips)} statements are not formatted, the limit is {FORMAT_SKIPS}"


def main() -> int:
    """Print every breach."""
    found = list(package_breaches())
    print("\n".join(found) or f"{len(FILES)} files keep the rules")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
