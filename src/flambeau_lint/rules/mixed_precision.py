"""torch.cuda.amp and torch.cpu.amp: one module for all devices has taken their place."""

import ast
from collections.abc import Iterator
from typing import Optional

from flambeau_lint import edits
from flambeau_lint.program import Program
from flambeau_lint.renaming import Call, finding, name_fix
from flambeau_lint.rule import Edit, Finding, Rule


def _first(device: str) -> Call:
    """The device as first argument; positional arguments of the old function follow it as they did."""

    def call(program: Program, node: ast.AST) -> Optional[tuple[Edit, ...]]:
        found = program.is_called(node)
        if found is None or edits.is_open(found):
            return None
        edit = edits.insert_first(program, found, f"'{device}'")
        if found.args and _name(program, node) == "autocast":
            # autocast(enabled) is autocast(device, dtype, enabled) now.
            return _enabled_by_name(program, found, edit)
        return None if edit is None else (edit,)

    return call


def _enabled_by_name(
    program: Program, call: ast.Call, edit: Optional[Edit]
) -> Optional[tuple[Edit, ...]]:
    if len(call.args) != 1 or edit is None:
        return None
    place = program.source.start_of(call.args[0])
    if place != edit.start:
        return None
    return (Edit(edit.start, edit.end, f"{edit.text}enabled="),)


def _name(program: Program, node: ast.AST) -> str:
    return program.dotted(node).rpartition(".")[2]


def _device_type(device: str) -> Call:
    """For the decorators custom_fwd and custom_bwd, with and without a call."""

    def call(program: Program, node: ast.AST) -> Optional[tuple[Edit, ...]]:
        found = program.is_called(node)
        text = f"device_type='{device}'"
        if found is not None:
            if found.args or edits.is_open(found):
                return None
            edit = edits.append_argument(program, found, text)
            return None if edit is None else (edit,)
        parent = program.parents.get(node)
        if node not in getattr(parent, "decorator_list", ()):
            return None
        end = program.source.end_of(node)
        return (Edit(end, end, f"({text})"),)

    return call


def _check(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    device = "cpu" if ".cpu." in rule.names[0] else "cuda"
    is_decorator = "custom" in rule.names[0]
    call = _device_type(device) if is_decorator else _first(device)
    yield finding(program, rule, node, name_fix(program, rule, node, call))


def _rule(code: str, old: str, example: str, fixed: str, *, runs: str = "FutureWarning") -> Rule:
    name = old.rpartition(".")[2]
    device = old.split(".")[1]
    new = f"torch.amp.{name}"
    is_decorator = name.startswith("custom")
    shown = f"{new}(device_type='{device}')" if is_decorator else f"{new}('{device}')"
    return Rule(
        code,
        old.replace("torch.", "").replace(".", "-").replace("_", "-").lower(),
        f"`{old}` is deprecated since torch 2.4: write `{shown}`",
        f"`{old}` 自 torch 2.4 起已弃用：改用 `{shown}`",
        example,
        fixed,
        "The device is the first argument, so that one program runs on each.",
        deprecated="2.4",
        use=new,
        fix="safe",
        runs=runs,
        names=(old, old.replace(f".{name}", f".{_MODULES[name]}.{name}")),
        check=_check,
    )


_MODULES = {
    "autocast": "autocast_mode",
    "custom_fwd": "autocast_mode",
    "custom_bwd": "autocast_mode",
    "GradScaler": "grad_scaler",
}

_FUNCTION = """import torch
from torch.{place} import {name}


class Double(torch.autograd.Function):
    @staticmethod
    @{name}{call}
    def {method}(ctx, x):
        return x * 2
"""


def _decorated(place: str, name: str, call: str) -> str:
    method = "forward" if name == "custom_fwd" else "backward"
    return _FUNCTION.format(place=place, name=name, call=call, method=method)


RULES: list[Rule] = [
    _rule(
        "FLB2120",
        "torch.cuda.amp.autocast",
        "import torch\n\nwith torch.cuda.amp.autocast(False):\n    out = torch.ones(2)\n",
        "import torch\n\nwith torch.amp.autocast('cuda', enabled=False):\n    out = torch.ones(2)\n",
    ),
    _rule(
        "FLB2121",
        "torch.cuda.amp.GradScaler",
        "from torch.cuda.amp import GradScaler\n\nout = GradScaler(enabled=False).get_scale()\n",
        "from torch.amp import GradScaler\n\nout = GradScaler('cuda', enabled=False).get_scale()\n",
    ),
    _rule(
        "FLB2122",
        "torch.cuda.amp.custom_fwd",
        _decorated("cuda.amp", "custom_fwd", ""),
        _decorated("amp", "custom_fwd", "(device_type='cuda')"),
    ),
    _rule(
        "FLB2123",
        "torch.cuda.amp.custom_bwd",
        _decorated("cuda.amp", "custom_bwd", ""),
        _decorated("amp", "custom_bwd", "(device_type='cuda')"),
    ),
    _rule(
        "FLB2124",
        "torch.cpu.amp.autocast",
        "import torch\n\nwith torch.cpu.amp.autocast():\n    out = torch.ones(2)\n",
        "import torch\n\nwith torch.amp.autocast('cpu'):\n    out = torch.ones(2)\n",
    ),
    _rule(
        "FLB2125",
        "torch.cpu.amp.GradScaler",
        "import torch\n\nout = torch.cpu.amp.GradScaler(enabled=False).get_scale()\n",
        "import torch\n\nout = torch.amp.GradScaler('cpu', enabled=False).get_scale()\n",
    ),
]
"""One rule per name."""
