"""Optimizers, schedulers, files and weights: rules that follow an object from where it is made."""

import ast
from collections.abc import Iterator
from typing import Optional

from flambeau_lint import edits
from flambeau_lint.program import Program
from flambeau_lint.renaming import finding
from flambeau_lint.rule import Edit, Finding, Fix, Rule
from flambeau_lint.rules.argument_rows import constant

_SCHEDULER = "torch.optim.lr_scheduler."
_PLATEAU = "torch.optim.lr_scheduler.ReduceLROnPlateau"
_OPTIMIZER = """import torch

net = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
"""
_STEP = f"""{_OPTIMIZER}scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
optimizer.step()
"""


def is_scheduler(program: Program, node: ast.expr) -> bool:
    """Whether it is a scheduler of torch that takes no figure."""
    made = program.made_by(node)
    return bool(made) and all(name.startswith(_SCHEDULER) and name != _PLATEAU for name in made)


def _step_epoch(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    assert isinstance(node, ast.Attribute)
    call = program.is_called(node)
    if call is None or not (call.args or edits.keyword(call, "epoch")) or edits.is_open(call):
        return
    warm = "torch.optim.lr_scheduler.CosineAnnealingWarmRestarts"
    if is_scheduler(program, node.value) and warm not in program.made_by(node.value):
        yield finding(program, rule, call)


def _get_lr(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    assert isinstance(node, ast.Attribute)
    call = program.is_called(node)
    if call is not None and not call.args and is_scheduler(program, node.value):
        end = program.source.end_of(node)
        fix = Fix((Edit(end - len("get_lr"), end, "get_last_lr"),))
        yield finding(program, rule, node, None if edits.is_in_fstring(program, node) else fix)


def _parameters_key(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """A group of an optimizer with 'parameters' for 'params'."""
    assert isinstance(node, ast.Call)
    groups: Optional[ast.AST] = edits.argument(node, 0, "params")
    is_fixed = True
    if isinstance(groups, ast.Name):
        is_fixed = len(program.loads[groups.id]) == 1  # others may read the key
        values = program.values_of(groups)
        groups = values[0] if len(values) == 1 else None
    for group in groups.elts if isinstance(groups, (ast.List, ast.Tuple)) else ():
        if not isinstance(group, ast.Dict):
            continue
        names = [constant(key) for key in group.keys if key is not None]
        for key in group.keys:
            if constant(key) == "parameters" and "params" not in names and key is not None:
                fix = Fix((edits.replace(program, key, "'params'"),)) if is_fixed else None
                yield finding(program, rule, key, fix)


def _load(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    assert isinstance(node, ast.Call)
    if not edits.has_argument(node, 99, "weights_only"):
        yield finding(program, rule, node.func)


def _load_unsafe(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    assert isinstance(node, ast.Call)
    found = edits.keyword(node, "weights_only")
    if found is not None and constant(found.value) is False:
        yield finding(program, rule, found)


def _pickle_module(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    assert isinstance(node, ast.Call)
    found = edits.keyword(node, "pickle_module")
    if found is not None:
        yield finding(program, rule, found)


def _plain_http(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    assert isinstance(node, ast.Call)
    text = constant(edits.argument(node, 0, "url"))
    if isinstance(text, str) and text.startswith("http://"):
        yield finding(program, rule, node.args[0] if node.args else node.func)


def _trust_repo(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    assert isinstance(node, ast.Call)
    found = edits.keyword(node, "trust_repo")
    if found is not None and constant(found.value) is True:
        yield finding(program, rule, found)


def _allow_pickle(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    assert isinstance(node, ast.Call)
    found = edits.keyword(node, "allow_pickle")
    if found is not None and constant(found.value) is True:
        yield finding(program, rule, found)


# ---------------------------------------------------------------- pretrained=

_FAMILIES = {
    "alexnet": "AlexNet",
    "densenet121": "DenseNet121",
    "densenet161": "DenseNet161",
    "densenet169": "DenseNet169",
    "densenet201": "DenseNet201",
    "googlenet": "GoogLeNet",
    "inception_v3": "Inception_V3",
    "mnasnet0_5": "MNASNet0_5",
    "mnasnet1_0": "MNASNet1_0",
    "mobilenet_v2": "MobileNet_V2",
    "mobilenet_v3_large": "MobileNet_V3_Large",
    "mobilenet_v3_small": "MobileNet_V3_Small",
    "resnet18": "ResNet18",
    "resnet34": "ResNet34",
    "resnet50": "ResNet50",
    "resnet101": "ResNet101",
    "resnet152": "ResNet152",
    "resnext50_32x4d": "ResNeXt50_32X4D",
    "resnext101_32x8d": "ResNeXt101_32X8D",
    "wide_resnet50_2": "Wide_ResNet50_2",
    "wide_resnet101_2": "Wide_ResNet101_2",
    "shufflenet_v2_x0_5": "ShuffleNet_V2_X0_5",
    "shufflenet_v2_x1_0": "ShuffleNet_V2_X1_0",
    "squeezenet1_0": "SqueezeNet1_0",
    "squeezenet1_1": "SqueezeNet1_1",
    "vgg11": "VGG11",
    "vgg11_bn": "VGG11_BN",
    "vgg13": "VGG13",
    "vgg13_bn": "VGG13_BN",
    "vgg16": "VGG16",
    "vgg16_bn": "VGG16_BN",
    "vgg19": "VGG19",
    "vgg19_bn": "VGG19_BN",
    **{f"efficientnet_b{number}": f"EfficientNet_B{number}" for number in range(8)},
}
_MODELS = tuple(f"torchvision.models.{name}" for name in _FAMILIES)
_BACKBONES = tuple(
    f"torchvision.models.{name}"
    for name in [
        "detection.fasterrcnn_resnet50_fpn",
        "detection.maskrcnn_resnet50_fpn",
        "detection.keypointrcnn_resnet50_fpn",
        "detection.retinanet_resnet50_fpn",
        "segmentation.fcn_resnet50",
        "segmentation.fcn_resnet101",
        "segmentation.deeplabv3_resnet50",
        "segmentation.deeplabv3_resnet101",
    ]
)


def _pretrained(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """pretrained=True means the first weights, IMAGENET1K_V1, and not DEFAULT."""
    assert isinstance(node, ast.Call)
    found = edits.keyword(node, "pretrained")
    place: Optional[ast.AST] = found
    value = found.value if found else None
    if found is None and node.args and isinstance(constant(node.args[0]), bool):
        place = value = node.args[0]
    if place is None:
        return
    yield finding(program, rule, place, _weights_fix(program, node, place, constant(value)))


def _weights_fix(program: Program, call: ast.Call, place: ast.AST, value: object) -> Optional[Fix]:
    if value is False:
        return Fix((edits.replace(program, place, "weights=None"),))
    family = _FAMILIES.get(program.dotted(call.func).rpartition(".")[2])
    if value is not True or family is None or edits.keyword(call, "weights"):
        return None
    # The name of the weights as a string needs no import.
    return Fix((edits.replace(program, place, "weights='IMAGENET1K_V1'"),))


def _pretrained_any(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    assert isinstance(node, ast.Call)
    for name in ("pretrained", "pretrained_backbone"):
        found = edits.keyword(node, name)
        if found is None:
            continue
        new = {"pretrained": "weights", "pretrained_backbone": "weights_backbone"}[name]
        fix = (
            Fix((edits.replace(program, found, f"{new}=None"),))
            if constant(found.value) is False
            else None
        )
        yield finding(program, rule, found, fix)


_LOAD = "import io\n\nimport torch\n\nfile = io.BytesIO()\ntorch.save(torch.ones(2), file)\nfile.seek(0)\n"
OPTIMIZERS = tuple(
    f"torch.optim.{name}"
    for name in [
        "SGD",
        "Adam",
        "AdamW",
        "Adagrad",
        "Adadelta",
        "RMSprop",
        "Rprop",
        "ASGD",
        "NAdam",
        "RAdam",
        "Adamax",
        "Muon",
    ]
)

RULES: list[Rule] = [
    Rule(
        "FLB2150", "scheduler-step-epoch",
        "an epoch given to `scheduler.step()` is deprecated since torch 1.4: call `step()` once per epoch",
        "给 `scheduler.step()` 传入 epoch 自 torch 1.4 起已弃用：每个 epoch 调用一次 `step()` 即可",
        _STEP + "scheduler.step(1)\nout = scheduler.get_last_lr()\n",
        _STEP + "scheduler.step()\nout = scheduler.get_last_lr()\n",
        "A number that does not count up by one each time is another schedule: start from last_epoch=.",
        deprecated="1.4", runs="UserWarning", attributes=("step",), check=_step_epoch,
    ),
    Rule(
        "FLB401", "scheduler-get-lr",
        "`scheduler.get_lr()` outside of a step gives a wrong rate in the epochs that change it: write"
        " `get_last_lr()`",
        "在步骤之外调用 `scheduler.get_lr()` 会在学习率变化的那个 epoch 得到错误的值：改用 `get_last_lr()`",
        _STEP + "out = scheduler.get_lr()\n", _STEP + "out = scheduler.get_last_lr()\n",
        deprecated="1.4", fix="safe", runs="UserWarning", attributes=("get_lr",), check=_get_lr,
    ),
    Rule(
        "FLB402", "parameters-key",
        "a parameter group is called by `'params'`: `'parameters'` raises KeyError",
        "参数组的键是 `'params'`：写 `'parameters'` 会引发 KeyError",
        "import torch\n\nnet = torch.nn.Linear(2, 2)\n"
        "out = len(torch.optim.SGD([{'parameters': net.parameters()}], 0.1).param_groups)\n",
        "import torch\n\nnet = torch.nn.Linear(2, 2)\n"
        "out = len(torch.optim.SGD([{'params': net.parameters()}], 0.1).param_groups)\n",
        fix="safe", runs="KeyError", calls=OPTIMIZERS, check=_parameters_key,
    ),
    Rule(
        "FLB320", "load-weights-only",
        "`torch.load` reads no objects of foreign classes by default since torch 2.6: whole models need"
        " `weights_only=False`, which runs code of the file",
        "自 torch 2.6 起 `torch.load` 默认不读取其他类的对象：整个模型需要 `weights_only=False`，而这会运行文件里的代码",
        _LOAD + "out = torch.load(file)\n", _LOAD + "out = torch.load(file, weights_only=True)\n",
        changed="2.6", calls=("torch.load",), check=_load,
    ),
    Rule(
        "FLB501", "load-runs-code",
        "`torch.load` without `weights_only=True` runs code that the file holds, before torch 2.6",
        "在 torch 2.6 之前，`torch.load` 不写 `weights_only=True` 会运行文件里的代码",
        _LOAD + "out = torch.load(file)\n", _LOAD + "out = torch.load(file, weights_only=True)\n",
        deprecated="1.13", until="2.6", calls=("torch.load",), check=_load,
    ),
    Rule(
        "FLB502", "load-of-objects",
        "`weights_only=False` runs code that the file holds: only for files that you made or trust",
        "`weights_only=False` 会运行文件里的代码：只用于你自己生成或信任的文件",
        _LOAD + "out = torch.load(file, weights_only=False)\n", _LOAD + "out = torch.load(file, weights_only=True)\n",
        deprecated="1.13", calls=("torch.load",), check=_load_unsafe,
    ),
    Rule(
        "FLB503", "load-pickle-module",
        "`pickle_module=` of `torch.load` turns `weights_only` off, and the file's code runs: drop it",
        "`torch.load` 的 `pickle_module=` 会关闭 `weights_only`，运行文件里的代码：删去",
        "import torch\n\n\ndef read(path, module):\n    return torch.load(path, pickle_module=module)\n",
        "import torch\n\n\ndef read(path):\n    return torch.load(path)\n",
        calls=("torch.load",), check=_pickle_module,
    ),
    Rule(
        "FLB504", "weights-over-http",
        "weights over plain http can be replaced on the way: use https, and `check_hash=True`",
        "通过明文 http 下载的权重可能在途中被替换：请用 https，并加 `check_hash=True`",
        "import torch\n\n\ndef read():\n    return torch.hub.load_state_dict_from_url('http://a.example/net.pth')\n",
        "import torch\n\n\ndef read():\n    return torch.hub.load_state_dict_from_url('https://a.example/net.pth')\n",
        calls=("torch.hub.load_state_dict_from_url", "torch.hub.download_url_to_file", "torch.utils.model_zoo.load_url"),
        check=_plain_http,
    ),
    Rule(
        "FLB505", "trust-repo",
        "`trust_repo=True` runs the hubconf.py of a repository without asking",
        "`trust_repo=True` 不经询问就运行仓库的 hubconf.py",
        "import torch\n\n\ndef net():\n    return torch.hub.load('a/b', 'net', trust_repo=True)\n",
        "import torch\n\n\ndef net():\n    return torch.hub.load('a/b', 'net', trust_repo='check')\n",
        deprecated="1.12", calls=("torch.hub.load", "torch.hub.list", "torch.hub.help"),
        check=_trust_repo,
    ),
    Rule(
        "FLB506", "numpy-pickle",
        "`allow_pickle=True` of `np.load` runs code that the file holds: only for files that you made or trust",
        "`np.load` 的 `allow_pickle=True` 会运行文件里的代码：只用于你自己生成或信任的文件",
        "import numpy as np\nimport torch  # noqa: F401\n\n\ndef read(path):\n    return np.load(path, allow_pickle=True)\n",
        "import numpy as np\nimport torch  # noqa: F401\n\n\ndef read(path):\n    return np.load(path)\n",
        calls=("numpy.load",), check=_allow_pickle,
    ),
    Rule(
        "FLB2151", "torchvision-pretrained",
        "`pretrained=` is deprecated since torchvision 0.13: True means `weights='IMAGENET1K_V1'`, which need not"
        " be the best",
        "`pretrained=` 自 torchvision 0.13 起已弃用：True 即 `weights='IMAGENET1K_V1'`，不一定是最好的权重",
        "from torchvision import models\n\nout = models.resnet18(pretrained=False).fc.out_features\n",
        "from torchvision import models\n\nout = models.resnet18(weights=None).fc.out_features\n",
        library="torchvision", deprecated="0.13", fix="safe", runs="UserWarning", calls=_MODELS, check=_pretrained,
    ),
    Rule(
        "FLB2152", "pretrained-backbone",
        "`pretrained=` and `pretrained_backbone=` are deprecated since torchvision 0.13: `weights=` and"
        " `weights_backbone=`",
        "`pretrained=` 和 `pretrained_backbone=` 自 torchvision 0.13 起已弃用：改用 `weights=` 和 `weights_backbone=`",
        "from torchvision.models.segmentation import fcn_resnet50\n\n"
        "out = fcn_resnet50(weights=None, pretrained_backbone=False).training\n",
        "from torchvision.models.segmentation import fcn_resnet50\n\n"
        "out = fcn_resnet50(weights=None, weights_backbone=None).training\n",
        "Without weights_backbone=None a detector downloads those of its backbone.",
        library="torchvision", deprecated="0.13", fix="safe", runs="UserWarning", calls=_BACKBONES,
        check=_pretrained_any,
    ),
]  # fmt: skip
"""One rule per habit."""
