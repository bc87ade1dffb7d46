"""What the tables of names are written with: one call per row, whose lines follow from its facts."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Callable, Optional

from flambeau_lint.renaming import moved_module
from flambeau_lint.rule import Check, Rule

_IMPORTS: Mapping[str, str] = {
    "torch": "import torch",
    "nn": "from torch import nn",
    "F": "import torch.nn.functional as F",
    "torchvision": "import torchvision",
    "timm": "import timm",
    "functorch": "import functorch",
}

Row = Callable[..., Rule]


def example(text: str) -> str:
    """A whole program of one expression; what already is one stays."""
    if "\n" in text or text.startswith(("import ", "from ")):
        return text if text.endswith("\n") else text + "\n"
    # Not after a quote, a dot or a letter: those are no names of modules.
    words = [word for word in _IMPORTS if re.search(rf"(?<![\w.'\"]){word}\.", text)]
    lines = [_IMPORTS[word] for word in words]
    return "\n".join([*lines, "", f"out = {text}", ""])


def library_of(dotted: str) -> str:
    root = dotted.partition(".")[0]
    return {"pytorch_lightning": "lightning", "functorch": "torch"}.get(root, root)


def gone(code: str, old: str, removed: str, use: str, bad: str, good: str, **more: str) -> Rule:
    """A name that a version has removed, or that only raises since then."""
    library = library_of(old)
    since = f", deprecated since {more['deprecated']}" if "deprecated" in more else ""
    since_zh = f"，{more['deprecated']} 起已弃用" if "deprecated" in more else ""
    en = f"`{old}` is gone since {library} {removed}{since}{_write(use)}"
    zh = f"`{old}` 自 {library} {removed} 起已移除{since_zh}{_write_zh(use)}"
    return _rule(
        code, old, use, en, zh, (bad, good), {"removed": removed, "runs": "AttributeError", **more}
    )


def old(
    code: str,
    name: str,
    deprecated: str,
    use: str,
    bad: str,
    good: str = "",
    *,
    check: Optional[Check] = None,
    preview: bool = False,
    **more: str,
) -> Rule:
    """A name that still works and has a better one; `check` looks at its uses in place of check_name."""
    library = library_of(name)
    quiet = ", without a warning" if more.get("runs", "silent") == "silent" else ""
    quiet_zh = "，且没有警告" if quiet else ""
    en = f"`{name}` is deprecated since {library} {deprecated}{quiet}{_write(use)}"
    zh = f"`{name}` 自 {library} {deprecated} 起已弃用{quiet_zh}{_write_zh(use)}"
    good = good or example(bad).replace(name, use)
    rule = _rule(code, name, use, en, zh, (bad, good), {"deprecated": deprecated, **more})
    return replace(rule, check=check, preview=preview)


def moved(
    code: str, name: str, since: str, use: str, bad: str, good: str = "", **more: str
) -> Rule:
    """A module whose names are in another one now."""
    library = library_of(name)
    is_gone = "removed" in more
    en = f"`{name}` {'is gone' if is_gone else 'has moved'} since {library} {since}{_write(use)}"
    zh = f"`{name}` 自 {library} {since} 起{'已移除' if is_gone else '已迁移'}{_write_zh(use)}"
    good = good or example(bad).replace(name, use)
    facts: dict[str, str] = {**({} if is_gone else {"deprecated": since}), **more}
    return _rule(code, name, use, en, zh, (bad, good), facts, is_module=True)


def _write(use: str) -> str:
    return f": write `{use}`" if _is_code(use) else f": {use}" if use else ""


def _write_zh(use: str) -> str:
    return f"：改用 `{use}`" if _is_code(use) else f"：{use}" if use else ""


def _is_code(use: str) -> bool:
    return bool(use) and " " not in use.split("(")[0].strip()


def _rule(
    code: str,
    name: str,
    use: str,
    en: str,
    zh: str,
    examples: tuple[str, str],
    facts: Mapping[str, str],
    *,
    is_module: bool = False,
) -> Rule:
    facts = dict(facts)
    why = facts.pop("why", "")
    lacks = facts.pop("lacks", "")
    also = facts.pop("also", "")
    en = facts.pop("en", en)
    zh = facts.pop("zh", zh)
    library = facts.pop("library", library_of(name))
    fix = facts.pop("fix", "none")
    if re.fullmatch(r"[\w.]+", use) is None:
        use = use if fix == "none" else use.split()[0]
    slug = re.sub(r"^(torch|torchvision)\.", "" if name.startswith("torch.") else "vision-", name)
    return Rule(
        code=code,
        name=re.sub(r"[-._]+", "-", slug).strip("-").lower(),
        en=en,
        zh=zh,
        bad=example(examples[0]),
        good=example(examples[1]),
        why=why,
        library=library,
        use=use,
        fix=fix,
        names=(name, *also.split()),
        check=moved_module(lacks.split()) if is_module else None,
        **facts,  # type: ignore[arg-type]
    )
