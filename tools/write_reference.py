#!/usr/bin/env python
"""Write docs/en/reference.md and docs/zh/reference.md: the doors of the package, and its commands.

    python tools/write_reference.py            # after a change of a door, its docstring, or a command
    python tools/write_reference.py --check    # print what is out of date, and end with 1 if anything is

Signatures and docstrings are those of the code; the examples stand here, and tests/test_docs.py runs them.
tests/test_write_options.py compares.
"""

import argparse
import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flambeau
from flambeau.cli.command import OF_ALL, VERBS, build_parser, exit_codes

ROOT = Path(__file__).resolve().parents[1]
_MOST_SHOWN = 24  # parameters; of what takes more the tables of its page have the rest
_FIRST = 8


@dataclass(frozen=True)
class Door:
    """Attributes: chinese: the first line of its docstring; page: where more of it stands."""

    chinese: str
    page: str = ""
    example: str = ""


START = """
from pathlib import Path

import numpy as np
from PIL import Image

for number in range(24):
    folder = Path("photos", "cat" if number % 2 else "dog")
    folder.mkdir(parents=True, exist_ok=True)
    levels = np.full((16, 16, 3), 40 + 160 * (number % 2) + number, np.uint8)
    Image.fromarray(levels).save(folder / f"{number}.png")
"""
DOORS = {
    "train": Door(
        "像 `flambeau train` 一样训练图像分类器；再次调用会继续它的运行。",
        "train.md",
        """
from flambeau import train

result = train("photos", out="runs/photos", model="tiny_convnet", epochs=2, bar=False)
print(result.folder, result.step)
""",
    ),
    "load": Door(
        "一个运行的模型，或把几个运行当作一个模型，对图像调用它。",
        "evaluate.md",
        """
from flambeau import load

predictor = load("runs/photos")
print(predictor("photos/cat/1.png"))
""",
    ),
    "evaluate": Door(
        "在带标签的图像上测量模型，每张图像计一次。",
        "evaluate.md",
        """
from flambeau import evaluate

evaluation = evaluate("runs/photos", "photos")
print(evaluation.accuracy, [one.name for one in evaluation.classes])
""",
    ),
    "export": Door(
        "像 `flambeau export` 一样导出图像分类器：输入图像文件，输出概率。",
        "export.md",
        """
from flambeau import export, load

shipped = export(load("runs/photos"), "photos", "shipped", allow_slower=True)
print(shipped.folder)
""",
    ),
    "sweep": Door(
        "像 `flambeau sweep` 一样训练多种设置；再次调用会继续。",
        "sweep.md",
        """
from flambeau import sweep

found = sweep(
    "photos", space={"lr": "0.01,0.1"}, trials=2, out="runs/search", model="tiny_convnet", epochs=1
)
print(found.best.settings)
""",
    ),
    "wrap": Door(
        "从 map 式数据集，或从某个路径或地址的带标签图像，得到批次。",
        "wrap.md",
        """
import torch
from flambeau import wrap
from torchvision.transforms import v2

transform = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
batches = wrap("photos", transform, batch_size=8, seed=0)
for images, labels in batches:
    print(images.shape, labels.shape)
""",
    ),
    "fast": Door(
        "更快地读取 DataLoader 的图像；其余都不变。",
        "fast_loader.md",
        """
from flambeau import fast
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

loader = fast(DataLoader(ImageFolder("photos", transform), batch_size=8, shuffle=True))
images, labels = next(iter(loader))
print(images.shape)
""",
    ),
    "Run": Door(
        "一个目录里的一次训练。",
        "run.md",
        """
from flambeau import Run
from torch import nn
from torch.utils.data import TensorDataset

model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(64, 4), torch.randint(2, (64,)))
run = Run("runs/own", model, optimizer, data, batch_size=16, duration="2ep")
for epoch in run.epochs():
    for x, y in run.batches():
        run.step(nn.functional.cross_entropy(model(x), y))
print(run.result.step)
""",
    ),
    "RunOptions": Door(
        "一次训练的选项；`Run` 按名称接收它们，并有说明。",
        "run.md",
        """
from flambeau import RunOptions

print(RunOptions(duration="2ep", batch_size=16, clip_norm=1.0).clip_norm)
""",
    ),
    "InputError": Door("输入有误；消息用一两行说明是什么，以及怎么办。"),
    "DamagedData": Door("数据的字节已损坏；其他 InputError 说的可能是没有损坏但不支持的数据。"),
    "NotFinite": Door("损失或梯度变成 NaN 或无穷大；权重是那一步之前的。"),
    "Preempted": Door("运行被要求停止，已经保存；进程以退出码 75 结束。"),
    "SaveFailed": Door("检查点写不下去；之前的检查点都完好。"),
    "UntrustedCode": Door("目录指名或含有代码，而没有什么表明它由使用者创建或信任。"),
    "WorkerLost": Door("数据加载进程死掉或卡住；消息指出它和它的样本。"),
}
CODES = {
    "no trial was trained to its end": "没有试验训练到结束",
    "stopped, and every run saved: the same command goes on": "已停止，每个运行都已保存：用同一命令继续",
    "a process has failed; the last line names it": "某个进程失败；最后一行指出是哪个",
    "stopped and saved: the same command goes on": "已停止并保存：用同一命令继续",
    "images of --drop were found, which --out has not left out": "有 --drop 的图像，而 --out 没有去掉它们",
    "they are the same": "两者相同",
    "they differ": "两者不同",
    "all is whole": "全部完好",
    "something is damaged, differs, or is not read": "有损坏、不同或没有读取的内容",
    "no page knows any of the words": "没有页面认识其中任何一个词",
    "`find` has found nothing": "`find` 什么也没找到",
    "nothing was found": "什么也没发现",
    "something was found": "有发现",
    "--selftest: a device computes something wrong": "--selftest：某个设备有算错的结果",
    "--verify-steps: this machine computes something wrong; continue on another one": (
        "--verify-steps：这台机器计算出错；请换一台机器继续"
    ),
    "memory ran out in one of several processes: the same command goes on": (
        "多个进程之一内存不足：用同一命令继续"
    ),
    "a data worker was lost: the same command goes on; --replay-step: the step was not bad": (
        "数据加载进程丢失：用同一命令继续；--replay-step：该步没有异常"
    ),
}
HELP = {
    "train": "训练图像分类器；同一命令会继续它的运行",
    "sweep": "训练多种设置，找出最好的",
    "launch": "在多个进程和多台机器上运行 train 或脚本",
    "doctor": "找出训练的时间花在哪里，并测量怎样会更快",
    "tune": "找出训练在这里最快的设置",
    "lint": "找出并改正脚本中被新版 torch 移除、弃用或改变的写法",
    "runs": "列出目录中的运行，一次 sweep 算一个：数据、模型、状态、最好的指标",
    "report": "把运行写成一个 HTML 文件：曲线、结果、设置和彼此的差别",
    "diff": "比较两次运行：从哪一步分开，为什么",
    "models": "按名称列出 --model 接受的模型",
    "inspect": "显示模型的组成：形状、参数、运算量、内存、感受野",
    "predict": "说出运行或导出的模型在图像中看到什么",
    "evaluate": "在带标签的图像上测量运行或导出的模型",
    "export": "把运行的模型写成 ONNX、torch.export 或编译的形式，并说明答案变了多少",
    "soup": "把几个运行的权重平均成一个模型",
    "features": "写出运行或预训练模型的图像特征",
    "check": "找出数据的问题：重复、泄漏、无法读取和异常的图像、类别、名称",
    "pack": "并行地在格式之间转换带标签的图像；同一命令会继续",
    "convert": "把 .pth、.safetensors、运行或检查点的权重写成新的 .safetensors 或 .pth",
    "verify": "检查运行以及恢复是否精确、导出、打包的图像或权重",
    "certify": "把运行的数据、设置、检查点和权重的哈希写进一个可以签名的文件",
    "how": "从页面中回答问题，或你粘贴的错误信息",
    "recipes": "列出配方，搜索配方和页面，显示一个，或复制几个到你的项目",
    "env": "报告版本、设备和可用的 CPU，以及哪些互不相配",
    "gpus": "显示 GPU 上运行着什么、属于谁，以及哪一块是这里的 cuda:0",
    "completion": "打印 bash、zsh 或 fish 的补全脚本",
}
WORDS = {
    "en": {
        "title": "Reference",
        "first": "Made from the signatures and docstrings of the code by `tools/write_reference.py`; "
        "`help(flambeau.NAME)` and `flambeau COMMAND --help` say the same.\n"
        "Whatever else the package contains is private, but for the [recipes](recipes/).",
        "doors": "The doors of the package",
        "start": "The examples use these images:",
        "more": "More, with every option: [{page}]({page}).",
        "errors": "Exceptions",
        "error_head": "| exception | is raised when |\n|---|---|",
        "commands": "Commands",
        "json": "Exit code 0 is done, 2 an error that you can fix (standard error says how), and 130 "
        "interrupted; the table has the others.\n"
        "With `--json` standard output holds what the last column says, and errors are "
        "[JSON as well](command_line.md#for-programs) ([schema](../schemas/error.json)).\n"
        "Schemas are JSON Schema 2020-12; the tests compare with them what the commands print.",
        "events": "`--json-lines`: one JSON object per event",
        "command_head": "| command | what it does | other exit codes | `--json` |\n|---|---|---|---|",
    },
    "zh": {
        "title": "参考",
        "first": "由 `tools/write_reference.py` 根据代码的签名和文档字符串生成；`help(flambeau.NAME)` 和 "
        "`flambeau COMMAND --help` 说的相同。\n"
        "除[配方](recipes/)以外，包里的其他内容都是私有的。",
        "doors": "包的入口",
        "start": "各例使用这些图像：",
        "more": "更多内容和全部选项：[{page}]({page})。",
        "errors": "异常",
        "error_head": "| 异常 | 何时抛出 |\n|---|---|",
        "commands": "命令",
        "json": "退出码 0 是完成，2 是可以自行改正的错误（标准错误中有说明），130 是被中断；表中是其他的。\n"
        "加上 `--json` 后，标准输出是最后一列所说的内容，错误[也是 JSON](command_line.md#给程序用)"
        "（[schema](../schemas/error.json)）。\n"
        "schema 采用 JSON Schema 2020-12；测试会用它们检查命令的输出。",
        "events": "`--json-lines`：每个事件一个 JSON 对象",
        "command_head": "| 命令 | 做什么 | 其他退出码 | `--json` |\n|---|---|---|---|",
    },
}
JSON = {
    "one": "一个 JSON 对象",
    "line": "每行一个 JSON 对象",
}


def shown_parameters(name: str) -> tuple[list[inspect.Parameter], bool]:
    """Those that the page shows, and whether there are more."""
    every = list(inspect.signature(getattr(flambeau, name)).parameters.values())
    has_more = len(every) > _MOST_SHOWN
    return every[:_FIRST] if has_more else every, has_more


def signature(name: str) -> str:
    """The call with names and defaults; what the values mean stands in the docstring."""
    shown, has_more = shown_parameters(name)
    plain = [one.replace(annotation=inspect.Parameter.empty) for one in shown]
    text = re.sub(r"<function (\w+) at 0x\w+>", r"\1", str(inspect.Signature(plain)))
    return f"{name}{text[:-1]}, ...)" if has_more else f"{name}{text}"


def docstring(name: str) -> str:
    """Without its example, which stands below, and without arguments that the signature leaves out."""
    door: Any = getattr(flambeau, name)
    text = inspect.getdoc(door) or ""
    if inspect.isclass(door) and not dataclasses.is_dataclass(door):
        text += "\n\n" + (inspect.getdoc(door.__init__) or "")
    text = text.split("\nExample:\n")[0].strip()
    if name in DOORS and not DOORS[name].example:
        return text
    shown, has_more = shown_parameters(name)
    if not has_more:
        return text
    names = {one.name for one in shown}
    lines, keeps = [], True
    for line in text.splitlines():
        if entry := re.match(r"    (\w+)(, \w+)*: ", line):
            keeps = entry[1] in names
        elif not line.startswith("    "):
            keeps = True
        lines += [line] if keeps else []
    return "\n".join(lines)


def doors(language: str) -> Iterator[str]:
    words = WORDS[language]
    yield f"## {words['doors']}\n\n{words['start']}\n\n```python\n{START.strip()}\n```\n"
    for name, door in DOORS.items():
        if not door.example:
            continue
        about = f"{door.chinese}\n" if language == "zh" else ""
        more = words["more"].format(page=door.page)
        yield (
            f"### `{name}`\n\n{about}{more}\n\n```text\n{signature(name)}\n\n{docstring(name)}\n```\n\n"
            f"```python\n{door.example.strip()}\n```\n"
        )


def errors(language: str) -> Iterator[str]:
    yield f"## {WORDS[language]['errors']}\n\n{WORDS[language]['error_head']}"
    for name, door in DOORS.items():
        if not door.example:
            english = docstring(name).split("\n")[0]
            yield f"| `{name}` | {door.chinese if language == 'zh' else english} |"


def commands(language: str) -> Iterator[str]:
    words = WORDS[language]
    yield f"\n## {words['commands']}\n\n{words['json']}\n\n{words['command_head']}"
    parser = build_parser([])
    (verbs,) = [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
    helps = {one.dest: str(one.help) for one in verbs._choices_actions}
    for name in VERBS:
        actions = verbs.choices[name]._actions
        parts = [one.choices for one in actions if isinstance(one, argparse._SubParsersAction)]
        actions = [*actions, *(a for part in parts for one in part.values() for a in one._actions)]
        flags = [one for one in actions if "--json" in one.option_strings]
        json = str(flags[0].help) if flags else ""
        json = json.removeprefix("print ").removesuffix(", for programs").removesuffix(" instead")
        schema = f"../schemas/{name}.json"
        what = helps[name]
        codes = {code: text for code, text in exit_codes(name).items() if OF_ALL.get(code) != text}
        if language == "zh":
            what = HELP[name]
            codes = {code: CODES[text] for code, text in codes.items()}
            several = " per " in json
            json = JSON["line" if several else "one"] if json else ""
        if name == "train":
            json = words["events"]
        if name == "lint":
            json = "`--output-format json`"
        if (ROOT / "docs" / "en" / schema).is_file():
            json += f" ([schema]({schema}))"
        if name == "lint":
            json += "; `rule CODE` ([schema](../schemas/lint_rule.json))"
        listed = "; ".join(f"{code}: {text}" for code, text in sorted(codes.items()))
        yield f"| `{name}` | {what} | {listed} | {json} |"


def page(language: str) -> str:
    words = WORDS[language]
    parts = [f"# {words['title']}\n\n{words['first']}\n"]
    parts += [*doors(language), *errors(language), *commands(language)]
    return "\n".join(parts) + "\n"


def main(words: list[str]) -> int:
    stale = 0
    for language in WORDS:
        path = ROOT / "docs" / language / "reference.md"
        new = page(language)
        if path.exists() and new == path.read_text(encoding="utf-8"):
            continue
        if words == ["--check"]:
            print(f"{path.relative_to(ROOT)} is out of date: python tools/write_reference.py")
            stale = 1
        else:
            path.write_text(new, encoding="utf-8")
    return stale


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
