"""The source tree keeps the rules of tools/check_house.py, and each of these rules can fail."""

from pathlib import Path, PurePosixPath
from types import ModuleType

import pytest

from load_script import load_script

ROOT = Path(__file__).resolve().parents[1]


HOUSE = load_script(ROOT / "tools" / "check_house.py")
FUNCTION_LINES = HOUSE.FUNCTION_LINES


@pytest.fixture
def house() -> ModuleType:
    return HOUSE


def test_the_source_tree_keeps_the_rules(house: ModuleType) -> None:
    assert list(house.package_breaches()) == []


def test_the_package_was_found(house: ModuleType) -> None:
    assert PurePosixPath("__init__.py") in house.FILES
    assert len(house.RECIPES) >= 10
    assert "torch" in house.REQUIRED


# ---------------------------------------------------------------- the checks can fail

DOC = '"""Line.\n\n一行。\n\nSource: own.\n"""\n'
LAZY = "def _f():\n    "
LONG_BODY = "    x = 1\n" * (FUNCTION_LINES + 1)
TEN = ", ".join(f"x{number}" for number in range(HOUSE.ARGUMENTS))

BAD = [  # path, what follows a good module docstring, the breach
    ("recipes/data/a.py", "import flambeau", "imports at module level flambeau"),
    ("recipes/data/a.py", "import numpy as np", "imports at module level numpy"),
    ("recipes/data/a.py", "from . import b", "flambeau.recipes.data"),
    ("recipes/data/a.py", "from ..setup import b", "level flambeau.recipes.setup"),
    ("recipes/data/a.py", "from ...data import b", "level flambeau.data"),
    ("recipes/a.py", LAZY + "from flambeau.data import x", "imports flambeau.data"),
    ("recipes/a.py", LAZY + "from flambeau import __version__", "imports flambeau"),
    ("recipes/a.py", "x = __import__('flambeau.data')", "level flambeau.data"),
    ("recipes/a.py", LAZY + "importlib.import_module('flambeau.data')", "imports flambeau.data"),
    ("recipes/a.py", "if TYPE_CHECKING:\n    import flambeau.data", "imports flambeau.data"),
    ("images/a.py", "from flambeau.run import x", "imports at module level flambeau.run"),
    ("images/a.py", LAZY + "from flambeau import cli", "imports flambeau.cli"),
    ("images/a.py", "import lmdb", "imports at module level lmdb"),
    ("images/a.py", "class A:\n    import lmdb", "imports at module level lmdb"),
    (
        "images/a.py",
        "try:\n    import lmdb\nfinally:\n    pass",
        "imports at module level lmdb",
    ),
    ("images/a.py", "from flambeau.cli import x", "level flambeau.cli"),
    ("run/loop/a.py", "from flambeau import *", "level flambeau.*"),
    ("cli/a.py", "import torch", "cli imports at module level torch"),
    ("cli/a.py", "import rich", "cli imports at module level rich"),
    ("cli/a.py", "from flambeau.data.loading.loader import Loader", "Loader, which imports numpy"),
    ("cli/a.py", "from flambeau.recipes.data import sample_order", "which imports torch"),
    ("__main__.py", "from flambeau.run import run", "level flambeau.run"),
    ("attic/a.py", "", "attic is not in the table"),
    ("b.py", "", "b.py is not in the table"),
    ("__init__.py", "import torch", "imports torch at module level"),
    ("__init__.py", "from flambeau.run.run import Run", "imports flambeau.run.run.Run at"),
    ("version.py", "import torch", "version.py imports at module level torch"),
    ("data/__init__.py", "__version__ = '1'", "more than its docstring"),
    ("recipes/__init__.py", "from torch import nn", "more than its docstring"),
    ("images/a.py", "os.environ['A'] = '1'", "sets os.environ['A'] at import"),
    (
        "images/a.py",
        "os.environ.setdefault('A', '1')",
        "runs `os.environ.setdefault('A', '1')`",
    ),
    (
        "images/a.py",
        "torch.backends.cudnn.benchmark = True",
        "sets torch.backends.cudnn.benchmark",
    ),
    ("images/a.py", "x, (sys.path, *y) = z", "sets sys.path at import"),
    ("images/a.py", "torch.manual_seed(0)", "runs `torch.manual_seed(0)`"),
    ("images/a.py", "_ = torch.manual_seed(0)", "calls torch.manual_seed"),
    ("images/a.py", "if True:\n    seed(1)", "runs `seed(1)`"),
    ("images/a.py", "class A:\n    seed(1)", "runs `seed(1)`"),
    ("images/a.py", "try:\n    x = 1\nexcept OSError:\n    seed(1)", "runs `seed(1)`"),
    ("images/a.py", "for x in y:\n    pass", "runs `for x in y:`"),
    ("cli/a.py", "logging.basicConfig()", "runs `logging.basicConfig()`"),
    ("run/loop/a.py", LAZY + "return m.cuda()", "calls .cuda()"),
    ("recipes/a.py", LAZY + "print(1)", "prints by itself"),
    ("recipes/a.py", 'def f():\n    """One."""', "f has no example"),
    ("recipes/a.py", "class F:\n    pass", "F has no example"),
    ("recipes/profile.py", "", "'profile' is the name of an installed module"),
    ("recipes/torch.py", "", "'torch' is the name of an installed module"),
    ("recipes/token/a.py", "", "'token' is the name of an installed module"),
    ("images/helpers.py", "", "'helpers' says nothing"),
    ("images/common/a.py", "", "'common' says nothing"),
    ("images/a.py", "def f():\n" + LONG_BODY, "f has 61 lines, the limit is 60"),
    ("images/a.py", f"def f({TEN}, *, y):\n    pass", "f takes 11 arguments, the limit is 10"),
    (
        "run/loop/a.py",
        f"class A:\n    def __init__(self, {TEN}, y=1):\n        pass",
        "A takes 11 arguments",
    ),
]
BAD += [
    ("images/a.py", "a, b = 1, f()", "packs unrelated values into one statement"),
    ("images/a.py", LAZY + "self.a, self.b = a, [1]", "packs unrelated values"),
    ("data/loading/a.py", LAZY + "from flambeau.data.sources.b import x", "imports sources, which"),
    (
        "run/loop/a.py",
        "if TYPE_CHECKING:\n    import flambeau.run.run",
        "imports run.py, which",
    ),
    ("data/cellar/a.py", "", "cellar is not in the table of STOREYS"),
    ("data/pack/a.py", "from flambeau.data.sources.b import _x", "_x is private to flambeau"),
    (
        "data/pack/a.py",
        "from flambeau.data.sources import path_format as f\nx = f._y",
        "_y is private to f",
    ),
]
BAD_DOCSTRINGS = [  # path, all of the source, the breach
    ("images/a.py", "x = 1", "no module docstring"),
    ("data/__init__.py", "", "no module docstring"),
    ("recipes/a.py", DOC.replace("Line.", "One\ntwo."), "one English line"),
    ("recipes/a.py", DOC.replace("Line.", "行。"), "one English line"),
    ("recipes/a.py", DOC.replace("一行。", "One line."), "the same line in Chinese"),
    ("recipes/a.py", '"""Line.\n\nSource: own.\n"""', "the same line in Chinese"),
    ("recipes/a.py", DOC.replace("Source: own.", "Own."), "no line 'Source: ...'"),
]


EXAMPLE = '    """One.\n\n    >>> 1\n    1\n    """\n'

GOOD = [
    ("recipes/a.py", "import torch.nn.functional as F\nfrom torch import nn\nimport os.path"),
    ("recipes/a.py", "def f():\n" + EXAMPLE + "    import numpy\n    return numpy.pi"),
    ("recipes/a.py", "class F:\n" + EXAMPLE + "    x: int = 3"),
    ("recipes/a.py", "if TYPE_CHECKING:\n    import numpy"),
    ("recipes/a.py", "class BadRecord(ValueError):\n    pass"),
    ("recipes/a.py", "@dataclasses.dataclass(frozen=True)\nclass Header:\n    x: int"),
    ("images/a.py", "import numpy\nfrom PIL import Image\nfrom flambeau.recipes.a import x"),
    ("images/a.py", "from .errors import InputError"),
    ("run/loop/a.py", "from flambeau.version import __version__"),
    ("images/a.py", LAZY + "import lmdb"),
    ("images/a.py", "x, (y, *z) = re.compile('a')\ny: dict[str, int] = {}\n'A comment.'"),
    ("images/a.py", LAZY + "os.environ['A'] = '1'\n    seed(1)"),
    ("images/a.py", "try:\n    import fcntl\nexcept ImportError:\n    fcntl = None"),
    ("images/a.py", "def f():\n" + LONG_BODY[: -len("    x = 1\n")]),
    ("images/a.py", f"class A:\n    def __init__(self, {TEN}, *more):\n        pass"),
    ("images/a.py", "a, b = b, f(a)\nlow, high = 0, -1\nx, y = f(1), f(2)\nx, y = p.x, p.y"),
    ("run/loop/a.py", LAZY + "torch.cuda.synchronize()"),
    ("cli/a.py", "from flambeau.errors import InputError"),
    ("cli/a.py", "from flambeau.cli import b\n" + LAZY + "import torch, flambeau.run.run"),
    ("__main__.py", "from flambeau.cli.command import main\nsys.exit(main())"),
    ("__init__.py", "import importlib\nfrom flambeau.version import __version__"),
    ("__init__.py", "if TYPE_CHECKING:\n    from flambeau.run.run import Run"),
]


def test_each_breach_is_found(house: ModuleType) -> None:
    wrong = []
    for path, source, message in [
        (path, DOC + body, text) for path, body, text in BAD
    ] + BAD_DOCSTRINGS:
        found = house.breaches(PurePosixPath(path), source)
        if len(found) != 1 or message not in found[0]:
            wrong.append((path, source.removeprefix(DOC), message, found))
    assert wrong == []


def test_the_linter_imports_nothing_of_others(house: ModuleType) -> None:
    path = PurePosixPath("a.py")
    doc = '"""Line."""\n'
    assert house.lint_breaches(path, f"{doc}import ast\nfrom flambeau_lint.rule import Rule") == []
    for line in ("import torch", "import flambeau.errors", "def f():\n    import torch"):
        (breach,) = house.lint_breaches(path, f"{doc}{line}")
        assert "flambeau_lint imports" in breach
    assert house.lint_breaches(path, "x = 1") == ["no module docstring"]
    server = f"{doc}from pygls.lsp.server import LanguageServer"
    assert house.lint_breaches(PurePosixPath("server.py"), server) == []
    assert len(house.lint_breaches(path, server)) == 1


def test_good_source_passes(house: ModuleType) -> None:
    found = {(path, body): house.breaches(PurePosixPath(path), DOC + body) for path, body in GOOD}
    assert {case: texts for case, texts in found.items() if texts} == {}


def test_circles_are_found(house: ModuleType) -> None:
    lazy = "def f():\n    from flambeau.data import a\n"
    typing_only = "if TYPE_CHECKING:\n    from flambeau.data.b import B\n"
    sources = {
        "data/__init__.py": DOC,
        "data/a.py": DOC + typing_only,
        "data/b.py": DOC + "import flambeau.data.c",
        "data/c.py": DOC + lazy,
        "data/d.py": DOC + "from flambeau.data.a import A",
    }
    found = house.circles({PurePosixPath(path): text for path, text in sources.items()})
    assert found == [["flambeau.data.a", "flambeau.data.b", "flambeau.data.c"]]
    del sources["data/c.py"]
    assert house.circles({PurePosixPath(path): text for path, text in sources.items()}) == []


def test_tables_that_are_out_of_date_are_found(
    house: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(house.FLOORS, "attic", house.FLOORS["data"])
    monkeypatch.setitem(house.STOREYS, "run", [*house.STOREYS["run"], {"cellar"}])
    found = list(house.table_breaches())
    assert "FLOORS names attic, which does not exist" in found
    assert "STOREYS names run/cellar, which does not exist" in found


PRIVATE_TEXTS = [
    ("from flambeau.cli.command import main", "line 1: flambeau.cli is private"),
    ("One line.\n\n```python\nimport flambeau.run.run\n```", "line 4: flambeau.run is private"),
    ("it raises `flambeau.errors.InputError`", "line 1: flambeau.errors is private"),
    ("    write('from flambeau.data.fast import fast')", "line 1: flambeau.data is private"),
    ("from flambeau import Run, images", "line 1: flambeau.images is private"),
    ("x\nfrom flambeau import (\n    Run,\n    cli as c,\n)", "line 2: flambeau.cli is private"),
]
PUBLIC_TEXTS = [
    "import flambeau\n\nflambeau.train('photos')",
    "from flambeau import InputError, Run as Loop",
    "from flambeau import (\n    fast,\n    wrap,\n)",
    "from flambeau.recipes.training.ema import EMA",
    "`from flambeau import fast;` and photos.flambeau-index, flambeau/run/run.py",
]


@pytest.mark.parametrize(("text", "breach"), PRIVATE_TEXTS)
def test_private_names_in_pages_are_found(house: ModuleType, text: str, breach: str) -> None:
    assert list(house.text_breaches(text)) == [breach]


@pytest.mark.parametrize("text", PUBLIC_TEXTS)
def test_public_names_may_stand_in_pages(house: ModuleType, text: str) -> None:
    assert list(house.text_breaches(text)) == []


SECTION = """What serves nobody is no command, `flambeau fly` for one.

| flag | of | why |
|---|---|---|
| `--json` | `runs`, `check` | programs |

| command | whom it serves | its own flags, and why |
|---|---|---|
| `flambeau runs` | who has many, `--never` | `--sort`: the best |
| `flambeau check` | the careful | `one`, `two`: its actions |
"""
FLAGS = {"runs": {"--json", "--sort"}, "check": {"--json", "one", "two"}}


def test_commands_and_flags_have_their_reasons(house: ModuleType) -> None:
    assert list(house.command_breaches(SECTION, FLAGS)) == []
    flags = house.command_flags()
    assert "--fresh" in flags["train"] and "--lr" not in flags["train"]
    assert {"find", "--top"} <= flags["recipes"] and "--version" in flags[""]


@pytest.mark.parametrize(
    ("flags", "breach"),
    [
        ({**FLAGS, "gpus": set()}, "`flambeau gpus` has no row"),
        (
            {**FLAGS, "runs": {*FLAGS["runs"], "--never"}},
            "`flambeau runs`: nothing says what --never is for",
        ),
        (
            {**FLAGS, "check": {*FLAGS["check"], "three"}},
            "`flambeau check`: nothing says what three is for",
        ),
        ({**FLAGS, "runs": {"--json"}}, "`flambeau runs` has no --sort"),
        ({**FLAGS, "runs": {"--sort"}}, "`flambeau runs` has no --json"),
    ],
)
def test_a_flag_without_a_reason_is_found(
    house: ModuleType, flags: dict[str, set[str]], breach: str
) -> None:
    assert list(house.command_breaches(SECTION, flags)) == [breach]


def test_a_command_that_is_gone_is_found(house: ModuleType) -> None:
    found = list(house.command_breaches(SECTION, {"check": FLAGS["check"]}))
    assert found == ["`flambeau runs` has a row and is no command"]
