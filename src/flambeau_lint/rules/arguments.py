"""Arguments that have gone, have another name, or must be given."""

import ast
from collections.abc import Iterator
from typing import Optional

from flambeau_lint import edits
from flambeau_lint.program import Program
from flambeau_lint.renaming import finding
from flambeau_lint.rule import Edit, Finding, Fix, Rule
from flambeau_lint.rules.argument_rows import (
    add,
    constant,
    drop,
    is_false,
    rename,
    replace_value,
    row,
)

_SCHEDULERS = tuple(
    f"torch.optim.lr_scheduler.{name}"
    for name in [
        "LambdaLR",
        "MultiplicativeLR",
        "StepLR",
        "MultiStepLR",
        "ConstantLR",
        "LinearLR",
        "ExponentialLR",
        "SequentialLR",
        "PolynomialLR",
        "CosineAnnealingLR",
        "ChainedScheduler",
        "ReduceLROnPlateau",
        "CyclicLR",
        "OneCycleLR",
        "CosineAnnealingWarmRestarts",
    ]
)
_LOSSES = tuple(
    f"torch.nn.{name}"
    for name in [
        "L1Loss",
        "NLLLoss",
        "PoissonNLLLoss",
        "KLDivLoss",
        "MSELoss",
        "BCELoss",
        "BCEWithLogitsLoss",
        "HingeEmbeddingLoss",
        "MultiLabelMarginLoss",
        "SmoothL1Loss",
        "SoftMarginLoss",
        "CrossEntropyLoss",
        "MultiLabelSoftMarginLoss",
        "CosineEmbeddingLoss",
        "MarginRankingLoss",
        "MultiMarginLoss",
        "TripletMarginLoss",
    ]
) + tuple(
    f"torch.nn.functional.{name}"
    for name in [
        "l1_loss",
        "nll_loss",
        "poisson_nll_loss",
        "kl_div",
        "mse_loss",
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
        "hinge_embedding_loss",
        "multilabel_margin_loss",
        "smooth_l1_loss",
        "soft_margin_loss",
        "cross_entropy",
        "multilabel_soft_margin_loss",
        "cosine_embedding_loss",
        "margin_ranking_loss",
        "multi_margin_loss",
        "triplet_margin_loss",
    ]
)
_DDP = (
    "torch.nn.parallel.DistributedDataParallel",
    "torch.nn.parallel.distributed.DistributedDataParallel",
)
_ONNX = ("torch.onnx.export",)
# Whose repositories torch.hub does not ask about.
_TRUSTED_OWNERS = ("facebookresearch", "facebookincubator", "pytorch", "fairinternal")
_LINEAR = "import torch\n\nnet = torch.nn.Linear(2, 2)\noptimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
_IMAGE = "torch.ones(1, 1, 2, 2)"


def _whole_betas(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """Adam(parameters, betas=(0, 0.9))."""
    assert isinstance(node, ast.Call)
    betas = edits.argument(node, 2, "betas")
    if isinstance(betas, (ast.Tuple, ast.List)):
        for one in betas.elts:
            if type(constant(one)) is int:
                yield finding(
                    program, rule, one, Fix((edits.replace(program, one, f"{constant(one)}.0"),))
                )


def _reduction(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """size_average= and reduce= as the reduction that they mean, where both are literal."""
    assert isinstance(node, ast.Call)
    given = {name: edits.keyword(node, name) for name in ("size_average", "reduce")}
    first = given["size_average"] or given["reduce"]
    if first is None:
        return
    values = {name: constant(one.value) if one else None for name, one in given.items()}
    is_literal = all(one is None or isinstance(values[name], bool) for name, one in given.items())
    reduction = "mean"
    if values["reduce"] is False:
        reduction = "none"
    elif values["size_average"] is False:
        reduction = "sum"
    fix: Optional[Fix] = None
    if is_literal and edits.keyword(node, "reduction") is None:
        edit = edits.replace(program, first, f"reduction='{reduction}'")
        second = given["reduce"] if first is given["size_average"] else None
        removed = edits.remove_argument(program, node, second) if second else None
        is_whole = second is None or (removed is not None and removed.start >= edit.end)
        fix = edits.as_fix((edit, removed) if second else (edit,)) if is_whole else None
    yield finding(program, rule, first, fix)


def _interpolate(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    assert isinstance(node, ast.Call)
    is_upsample = isinstance(node.func, (ast.Attribute, ast.Name)) and program.dotted(
        node.func
    ).endswith("Upsample")
    mode = edits.argument(node, 2 if is_upsample else 3, "mode")
    if constant(mode) not in ("bilinear", "trilinear", "linear"):
        return  # 'bicubic' came after the change
    if edits.has_argument(node, 3 if is_upsample else 4, "align_corners"):
        return
    edit = edits.append_argument(program, node, "align_corners=False")
    yield finding(program, rule, node.func, edits.as_fix((edit,)))


def _missing_dim(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    assert isinstance(node, ast.Call)
    position = 0 if program.dotted(node.func).startswith("torch.nn.S") else 1
    if program.dotted(node.func).startswith("torch.nn.L"):
        position = 0
    if not edits.has_argument(node, position, "dim"):
        yield finding(program, rule, node.func)


def _qr(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """torch.qr(a, some) as torch.linalg.qr(a, mode)."""
    assert isinstance(node, ast.Call)
    renamed = (
        edits.rename_chain(program, node.func, rule.use)
        if isinstance(node.func, ast.Attribute)
        else None
    )
    some = edits.argument(node, 1, "some")
    fix: Optional[Fix] = None
    if renamed is not None and some is None and len(node.args) == 1 and not node.keywords:
        fix = Fix(renamed)
    elif renamed is not None and some is not None and constant(some) in (True, False):
        mode = "reduced" if constant(some) else "complete"
        place = edits.keyword(node, "some") or some
        fix = Fix((*renamed, edits.replace(program, place, f"mode='{mode}'")))
    yield finding(program, rule, node.func, fix)


def _cholesky(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """torch.cholesky(a) as torch.linalg.cholesky(a); the upper factor is its adjoint."""
    assert isinstance(node, ast.Call)
    renamed = (
        edits.rename_chain(program, node.func, rule.use)
        if isinstance(node.func, ast.Attribute)
        else None
    )
    upper = edits.argument(node, 1, "upper")
    fix: Optional[Fix] = None
    if renamed is not None and len(node.args) + len(node.keywords) == 1 and not edits.is_open(node):
        fix = Fix(renamed)
    elif renamed is not None and constant(upper) in (True, False) and upper is not None:
        removed = edits.remove_argument(program, node, edits.keyword(node, "upper") or upper)
        end = program.source.end_of(node)
        more = (Edit(end, end, ".mH"),) if constant(upper) else ()
        fix = edits.as_fix((*renamed, removed, *more))
    yield finding(program, rule, node.func, fix)


def _chain(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """torch.chain_matmul(a, b, c) as torch.linalg.multi_dot([a, b, c])."""
    assert isinstance(node, ast.Call)
    renamed = (
        edits.rename_chain(program, node.func, rule.use)
        if isinstance(node.func, ast.Attribute)
        else None
    )
    fix: Optional[Fix] = None
    place = edits.after_paren(program, node)
    if renamed is not None and node.args and not node.keywords and place is not None:
        end = program.source.end_of(node.args[-1])
        fix = Fix((*renamed, Edit(place, place, "["), Edit(end, end, "]")))
    yield finding(program, rule, node.func, fix)


def _positional_state_dict(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    assert isinstance(node, ast.Attribute)
    call = program.is_called(node)
    made = program.made_by(node.value)
    if (
        call is not None
        and call.args
        and made
        and all(name.startswith("torch.nn.") for name in made)
    ):
        yield finding(program, rule, node)


def _data_source(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """super().__init__(data_source) of a sampler."""
    for owner in program.classes:
        bases = {program.dotted(base) for base in owner.bases}
        samplers = {"torch.utils.data.Sampler", "torch.utils.data.sampler.Sampler"}
        if not bases & samplers or len(owner.bases) != 1:
            continue
        for init in program.attributes_by_class("__init__").get(owner, ()):
            call = program.is_called(init)
            value = init.value
            is_super = isinstance(value, ast.Call) and getattr(value.func, "id", "") == "super"
            if call is not None and is_super and len(call.args) == 1 and not call.keywords:
                edit = edits.remove_argument(program, call, call.args[0])
                yield finding(program, rule, call, edits.as_fix((edit,)))


def _hook(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    yield from finding_if_called(program, rule, node)


def finding_if_called(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    if program.is_called(node) is not None:
        yield finding(program, rule, node)


def _meshgrid(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    assert isinstance(node, ast.Call)
    if edits.keyword(node, "indexing") is None and not any(
        one.arg is None for one in node.keywords
    ):
        edit = edits.append_argument(program, node, "indexing='ij'")
        yield finding(program, rule, node.func, edits.as_fix((edit,)))


def _dynamic_axes(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """dynamic_axes= of the default exporter; with dynamo=False it is right."""
    assert isinstance(node, ast.Call)
    found = edits.keyword(node, "dynamic_axes")
    if found is not None and not edits.keyword(node, "dynamo") and not edits.is_open(node):
        yield finding(program, rule, found)


def _hub_load(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    assert isinstance(node, ast.Call)
    is_local = constant(edits.argument(node, 99, "source")) == "local"
    repository = constant(edits.argument(node, 0, "repo_or_dir"))
    is_known = isinstance(repository, str) and repository.partition("/")[0] in _TRUSTED_OWNERS
    if not (is_local or is_known or edits.has_argument(node, 99, "trust_repo")):
        yield finding(program, rule, node.func)


def _stft(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    assert isinstance(node, ast.Call)
    if not edits.has_argument(node, 9, "return_complex"):
        yield finding(program, rule, node.func)


def _old_form(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """addmm(beta, input, alpha, mat1, mat2): numbers come by name."""
    assert isinstance(node, ast.Call)
    if len(node.args) > 3 and isinstance(constant(node.args[0]), (int, float)):
        yield finding(program, rule, node.func)


def _lstm_dropout(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    assert isinstance(node, ast.Call)
    layers = edits.argument(node, 2, "num_layers")
    dropout = edits.argument(node, 5, "dropout")
    value = constant(dropout)
    is_one = layers is None or constant(layers) == 1
    if not edits.is_open(node) and is_one and isinstance(value, (int, float)) and value > 0:
        yield finding(program, rule, edits.keyword(node, "dropout") or node.func)


def _cross(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    assert isinstance(node, ast.Call)
    if len(node.args) >= 1 and not edits.has_argument(node, 2, "dim"):
        yield finding(program, rule, node.func)


def _names_argument(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    assert isinstance(node, ast.Call)
    found = edits.keyword(node, "names")
    if found is not None:
        yield finding(program, rule, found)


_FACTORIES = tuple(
    f"torch.{name}" for name in ["zeros", "ones", "empty", "rand", "randn", "tensor", "full"]
)
_CHECKPOINT = "import torch\nfrom torch.utils.checkpoint import checkpoint\n\nx = torch.ones(2, requires_grad=True)\n"
_A = "torch.tensor([[4.0, 1.0], [1.0, 3.0]])"
_NO_ARGUMENT = "TypeError"

_ARGUMENTS: list[Rule] = [
    row("FLB187", "torch.qr", ("torch.qr",), _qr,
        ("`torch.qr` raises since torch 2.14: write `torch.linalg.qr`, `mode='complete'` for `some=False`",
         "`torch.qr` 自 torch 2.14 起报错：改用 `torch.linalg.qr`，`some=False` 即 `mode='complete'`"),
        (f"torch.qr({_A})[1]", f"torch.linalg.qr({_A})[1]"),
        deprecated="1.9", removed="2.14", use="torch.linalg.qr", fix="safe", runs="RuntimeError"),
    row("FLB188", "torch.cholesky", ("torch.cholesky",), _cholesky,
        ("`torch.cholesky` raises since torch 2.14: write `torch.linalg.cholesky`, with `.mH` for the upper"
         " factor",
         "`torch.cholesky` 自 torch 2.14 起报错：改用 `torch.linalg.cholesky`，上三角因子再取 `.mH`"),
        (f"torch.cholesky({_A}, upper=True)", f"torch.linalg.cholesky({_A}).mH"),
        deprecated="1.9", removed="2.14", use="torch.linalg.cholesky", fix="safe", runs="RuntimeError"),
    row("FLB2130", "torch.chain_matmul", ("torch.chain_matmul",), _chain,
        ("`torch.chain_matmul` is deprecated since torch 1.9: write `torch.linalg.multi_dot`, which takes a list",
         "`torch.chain_matmul` 自 torch 1.9 起已弃用：改用接收列表的 `torch.linalg.multi_dot`"),
        (f"torch.chain_matmul({_A}, {_A})", f"torch.linalg.multi_dot([{_A}, {_A}])"),
        deprecated="1.9", use="torch.linalg.multi_dot", fix="safe", runs="UserWarning"),
    row("FLB2131", "torch.cross without dim", ("torch.cross",), _cross,
        ("`torch.cross` without `dim` takes the first dimension of size 3, deprecated since torch 1.13: name it",
         "`torch.cross` 不写 `dim` 时取第一个大小为 3 的维度，自 torch 1.13 起已弃用：请写明"),
        ("torch.cross(torch.ones(3, 3), torch.ones(3, 3))", "torch.cross(torch.ones(3, 3), torch.ones(3, 3), dim=0)"),
        deprecated="1.13", runs="UserWarning"),
    row("FLB2132", "meshgrid without indexing", ("torch.meshgrid",), _meshgrid,
        ("`torch.meshgrid` without `indexing` warns since torch 1.10: `indexing='ij'` is what it does",
         "`torch.meshgrid` 不写 `indexing` 自 torch 1.10 起有警告：`indexing='ij'` 是目前的含义"),
        ("torch.meshgrid(torch.ones(2), torch.ones(3))[0]",
         "torch.meshgrid(torch.ones(2), torch.ones(3), indexing='ij')[0]"),
        deprecated="1.10", fix="safe", runs="UserWarning",
        why="NumPy's meshgrid is 'xy' by default, and torch's may become so."),
    row("FLB189", "scheduler verbose", _SCHEDULERS, drop("verbose"),
        ("`verbose=` of schedulers is gone since torch 2.7: print `scheduler.get_last_lr()`",
         "调度器的 `verbose=` 自 torch 2.7 起已移除：请打印 `scheduler.get_last_lr()`"),
        (_LINEAR + "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, verbose=True)\n"
         "out = scheduler.get_last_lr()\n",
         _LINEAR + "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)\nout = scheduler.get_last_lr()\n"),
        deprecated="2.2", removed="2.7", fix="safe", runs=_NO_ARGUMENT),
    row("FLB2133", "size_average and reduce", _LOSSES, _reduction,
        ("`size_average=` and `reduce=` are deprecated since torch 0.4.1: write `reduction=`",
         "`size_average=` 和 `reduce=` 自 torch 0.4.1 起已弃用：改用 `reduction=`"),
        ("nn.MSELoss(size_average=False)(torch.ones(2), torch.zeros(2))",
         "nn.MSELoss(reduction='sum')(torch.ones(2), torch.zeros(2))"),
        deprecated="0.4.1", fix="safe", runs="UserWarning"),
    row("FLB2134", "elementwise_mean", _LOSSES,
        replace_value("reduction", lambda node: constant(node) == "elementwise_mean", "'mean'"),
        ("`reduction='elementwise_mean'` is deprecated since torch 1.0: write `'mean'`",
         "`reduction='elementwise_mean'` 自 torch 1.0 起已弃用：改用 `'mean'`"),
        ("nn.MSELoss(reduction='elementwise_mean')(torch.ones(2), torch.zeros(2))",
         "nn.MSELoss(reduction='mean')(torch.ones(2), torch.zeros(2))"),
        deprecated="1.0", fix="safe", runs="UserWarning"),
    row("FLB310", "interpolate without align_corners",
        ("torch.nn.functional.interpolate", "torch.nn.functional.upsample", "torch.nn.Upsample"), _interpolate,
        ("linear interpolation without `align_corners`: the default is False since torch 0.4, and was True"
         " before; name it",
         "线性插值未写 `align_corners`：自 torch 0.4 起默认 False，此前为 True；请写明"),
        (f"F.interpolate({_IMAGE}, scale_factor=2, mode='bilinear')",
         f"F.interpolate({_IMAGE}, scale_factor=2, mode='bilinear', align_corners=False)"),
        changed="0.4", fix="safe", why="Weights that were trained before expect the old corners."),
    row("FLB311", "grid_sample without align_corners", ("torch.nn.functional.grid_sample",),
        add("align_corners", 4, "False", minimum=1),
        ("`grid_sample` without `align_corners` warns: the default is False since torch 1.3, and was True before",
         "`grid_sample` 未写 `align_corners` 会有警告：自 torch 1.3 起默认 False，此前为 True"),
        (f"F.grid_sample({_IMAGE}, torch.zeros(1, 2, 2, 2))",
         f"F.grid_sample({_IMAGE}, torch.zeros(1, 2, 2, 2), align_corners=False)"),
        deprecated="1.3", fix="safe", runs="UserWarning"),
    row("FLB312", "affine_grid without align_corners", ("torch.nn.functional.affine_grid",),
        add("align_corners", 2, "False", minimum=1),
        ("`affine_grid` without `align_corners` warns: the default is False since torch 1.3, and was True before",
         "`affine_grid` 未写 `align_corners` 会有警告：自 torch 1.3 起默认 False，此前为 True"),
        ("F.affine_grid(torch.ones(1, 2, 3), (1, 1, 2, 2))",
         "F.affine_grid(torch.ones(1, 2, 3), (1, 1, 2, 2), align_corners=False)"),
        deprecated="1.3", fix="safe", runs="UserWarning"),
    row("FLB2135", "softmax without dim",
        ("torch.nn.functional.softmax", "torch.nn.functional.log_softmax", "torch.nn.functional.softmin",
         "torch.nn.Softmax", "torch.nn.LogSoftmax", "torch.nn.Softmin"), _missing_dim,
        ("softmax without `dim` is deprecated since torch 0.4: it takes dimension 0 of 1-D and 3-D tensors, 1 of"
         " others",
         "softmax 未写 `dim` 自 torch 0.4 起已弃用：一维和三维张量取第 0 维，其他取第 1 维"),
        ("F.softmax(torch.ones(2, 3))", "F.softmax(torch.ones(2, 3), dim=1)"),
        deprecated="0.4", runs="UserWarning"),
    row("FLB2136", "gumbel_softmax eps", ("torch.nn.functional.gumbel_softmax",), drop("eps"),
        ("`eps=` of `gumbel_softmax` has no effect: drop it", "`gumbel_softmax` 的 `eps=` 不起作用：删去"),
        ("F.gumbel_softmax(torch.ones(2, 3), eps=1e-8)", "F.gumbel_softmax(torch.ones(2, 3))"),
        deprecated="1.4", fix="safe", runs="UserWarning"),
    row("FLB2137", "checkpoint without use_reentrant",
        ("torch.utils.checkpoint.checkpoint", "torch.utils.checkpoint.checkpoint_sequential"),
        add("use_reentrant", 99, "False", is_safe=False),
        ("`checkpoint` without `use_reentrant` warns since torch 2.1: `use_reentrant=False` is what it advises",
         "`checkpoint` 未写 `use_reentrant` 自 torch 2.1 起有警告：建议 `use_reentrant=False`"),
        (_CHECKPOINT + "out = checkpoint(torch.sin, x)\n",
         _CHECKPOINT + "out = checkpoint(torch.sin, x, use_reentrant=False)\n"),
        deprecated="2.1", fix="unsafe", runs="UserWarning",
        why="The default is the reentrant kind, which gives no gradients where no input needs one."),
    row("FLB2138", "DataLoader pin_memory_device", ("torch.utils.data.DataLoader",), drop("pin_memory_device"),
        ("`pin_memory_device=` has no effect since torch 2.9: drop it",
         "`pin_memory_device=` 自 torch 2.9 起不起作用：删去"),
        ("import torch\nfrom torch.utils.data import DataLoader\n\n"
         "out = len(DataLoader(torch.ones(2), pin_memory_device='cuda'))",
         "import torch\nfrom torch.utils.data import DataLoader\n\nout = len(DataLoader(torch.ones(2)))"),
        deprecated="2.9", fix="safe"),
    row("FLB2139", "DDP broadcast_buffers", _DDP,
        rename("broadcast_buffers", "forward_sync_buffers", is_safe=False),
        ("`broadcast_buffers=` of DistributedDataParallel warns since torch 2.13: write `forward_sync_buffers=`",
         "DistributedDataParallel 的 `broadcast_buffers=` 自 torch 2.13 起有警告：改用 `forward_sync_buffers=`"),
        ("from torch.nn.parallel import DistributedDataParallel as DDP\n\n\ndef wrap(net):\n"
         "    return DDP(net, broadcast_buffers=False)\n",
         "from torch.nn.parallel import DistributedDataParallel as DDP\n\n\ndef wrap(net):\n"
         "    return DDP(net, forward_sync_buffers=False)\n"),
        deprecated="2.13", fix="unsafe", runs="FutureWarning", why="An older torch does not know the new name."),
    row("FLB2168", "DDP check_reduction", _DDP, drop("check_reduction"),
        ("`check_reduction=` of DistributedDataParallel does nothing since torch 1.7, and True warns: drop it",
         "DistributedDataParallel 的 `check_reduction=` 自 torch 1.7 起不起作用，写 True 还会警告：删去"),
        ("from torch.nn.parallel import DistributedDataParallel as DDP\n\n\ndef wrap(net):\n"
         "    return DDP(net, check_reduction=True)\n",
         "from torch.nn.parallel import DistributedDataParallel as DDP\n\n\ndef wrap(net):\n    return DDP(net)\n"),
        deprecated="1.7", fix="safe", runs="FutureWarning"),
    row("FLB191", "profile use_cuda", ("torch.profiler.profile", "torch.autograd.profiler.profile"),
        drop("use_cuda", fixes=False),
        ("`use_cuda=` of `profile` is gone since torch 2.14: `use_device='cuda'` of torch.autograd's,"
         " `activities=` of torch.profiler's",
         "`profile` 的 `use_cuda=` 自 torch 2.14 起已移除：torch.autograd 的用 `use_device='cuda'`，"
         "torch.profiler 的用 `activities=`"),
        ("import torch\n\nwith torch.autograd.profiler.profile(use_cuda=False):\n    out = torch.ones(2)\n",
         "import torch\n\nwith torch.autograd.profiler.profile():\n    out = torch.ones(2)\n"),
        deprecated="2.1", removed="2.14", runs=_NO_ARGUMENT),
    row("FLB192", "onnx enable_onnx_checker", _ONNX, drop("enable_onnx_checker"),
        ("`enable_onnx_checker=` is gone since torch 1.11: drop it",
         "`enable_onnx_checker=` 自 torch 1.11 起已移除：删去"),
        ("import torch\nimport torch.onnx\n\nnet = torch.nn.ReLU().eval()\ntorch.onnx.export(net, torch.ones(2), enable_onnx_checker=True)\n",
         "import torch\nimport torch.onnx\n\nnet = torch.nn.ReLU().eval()\ntorch.onnx.export(net, torch.ones(2))\n"),
        deprecated="1.10", removed="1.11", fix="safe", runs=_NO_ARGUMENT),
    row("FLB193", "onnx example_outputs", _ONNX, drop("example_outputs"),
        ("`example_outputs=` is gone since torch 1.11: drop it", "`example_outputs=` 自 torch 1.11 起已移除：删去"),
        ("import torch\nimport torch.onnx\n\nnet = torch.nn.ReLU().eval()\ntorch.onnx.export(net, torch.ones(2), example_outputs=None)\n",
         "import torch\nimport torch.onnx\n\nnet = torch.nn.ReLU().eval()\ntorch.onnx.export(net, torch.ones(2))\n"),
        deprecated="1.10", removed="1.11", fix="safe", runs=_NO_ARGUMENT),
    row("FLB194", "onnx use_external_data_format", _ONNX, rename("use_external_data_format", "external_data", is_safe=False),
        ("`use_external_data_format=` is gone since torch 1.11: `external_data=` of the new exporter says it",
         "`use_external_data_format=` 自 torch 1.11 起已移除：新导出器用 `external_data=`"),
        ("import torch\nimport torch.onnx\n\nnet = torch.nn.ReLU().eval()\ntorch.onnx.export(net, torch.ones(2), use_external_data_format=True)\n",
         "import torch\nimport torch.onnx\n\nnet = torch.nn.ReLU().eval()\ntorch.onnx.export(net, torch.ones(2), external_data=True)\n"),
        deprecated="1.10", removed="1.11", fix="unsafe", runs=_NO_ARGUMENT),
    row("FLB195", "onnx _retain_param_name", _ONNX, drop("_retain_param_name"),
        ("`_retain_param_name=` is gone since torch 1.11: drop it",
         "`_retain_param_name=` 自 torch 1.11 起已移除：删去"),
        ("import torch\nimport torch.onnx\n\nnet = torch.nn.ReLU().eval()\ntorch.onnx.export(net, torch.ones(2), _retain_param_name=True)\n",
         "import torch\nimport torch.onnx\n\nnet = torch.nn.ReLU().eval()\ntorch.onnx.export(net, torch.ones(2))\n"),
        deprecated="1.10", removed="1.11", fix="safe", runs=_NO_ARGUMENT),
    row("FLB2140", "onnx operator_export_type", _ONNX, drop("operator_export_type", is_safe=False),
        ("`operator_export_type=` means nothing to the default exporter since torch 2.9",
         "`operator_export_type=` 对 torch 2.9 起的默认导出器没有意义"),
        ("import torch\nimport torch.onnx\n\nnet = torch.nn.ReLU().eval()\ntorch.onnx.export(net, torch.ones(2), operator_export_type=None)\n",
         "import torch\nimport torch.onnx\n\nnet = torch.nn.ReLU().eval()\ntorch.onnx.export(net, torch.ones(2))\n"),
        deprecated="2.9", fix="unsafe"),
    row("FLB2141", "onnx dynamo=False", _ONNX, drop("dynamo", where=is_false, fixes=False),
        ("`dynamo=False` is the exporter of TorchScript, which gets no more work; the default is True since"
         " torch 2.9",
         "`dynamo=False` 使用不再开发的 TorchScript 导出器；自 torch 2.9 起默认为 True"),
        ("import torch\nimport torch.onnx\n\nnet = torch.nn.ReLU().eval()\ntorch.onnx.export(net, torch.ones(2), 'net.onnx', dynamo=False)\n",
         "import torch\nimport torch.onnx\n\nnet = torch.nn.ReLU().eval()\ntorch.onnx.export(net, torch.ones(2), 'net.onnx', dynamo=True)\n"),
        deprecated="2.9", runs="DeprecationWarning"),
    row("FLB2142", "onnx dynamic_axes", _ONNX, _dynamic_axes,
        ("`dynamic_axes=` is for the old exporter: `dynamic_shapes=` of the default one since torch 2.9",
         "`dynamic_axes=` 用于旧导出器：自 torch 2.9 起默认导出器用 `dynamic_shapes=`"),
        ("import torch\nimport torch.onnx\n\nnet = torch.nn.ReLU().eval()\ntorch.onnx.export(net, torch.ones(2, 3), input_names=['x'], dynamic_axes={'x': {0: 'n'}})\n",
         "import torch\nimport torch.onnx\n\nnet = torch.nn.ReLU().eval()\ntorch.onnx.export(net, torch.ones(2, 3), input_names=['x'], dynamic_shapes=({0: 'n'},))\n"),
        deprecated="2.9", runs="UserWarning"),
    row("FLB196", "stft without return_complex", ("torch.stft",), _stft,
        ("`torch.stft` without `return_complex` raises since torch 2.0: `return_complex=True`, and"
         " `torch.view_as_real` for the old layout",
         "`torch.stft` 未写 `return_complex` 自 torch 2.0 起报错：写 `return_complex=True`，旧布局用 `torch.view_as_real`"),
        ("torch.stft(torch.ones(16), 8, window=torch.ones(8))",
         "torch.stft(torch.ones(16), 8, window=torch.ones(8), return_complex=True)"),
        deprecated="1.8", removed="2.0", runs="RuntimeError"),
    row("FLB2143", "hub.load without trust_repo", ("torch.hub.load",), _hub_load,
        ("`torch.hub.load` without `trust_repo` asks at the terminal since torch 2.0, which a job has not: write"
         " `trust_repo='check'` where it shall ask",
         "`torch.hub.load` 未写 `trust_repo` 自 torch 2.0 起会在终端询问，而后台任务没有终端：确要询问时写 `trust_repo='check'`"),
        ("import torch\n\n\ndef net():\n    return torch.hub.load('a/b', 'net')\n",
         "import torch\n\n\ndef net():\n    return torch.hub.load('a/b', 'net', trust_repo='check')\n"),
        deprecated="1.12", runs="silent", why="It downloads a repository and runs its hubconf.py."),
    row("FLB2144", "numbers first", tuple(f"torch.{n}" for n in ["addmm", "addmv", "addbmm", "baddbmm", "addr"]), _old_form,
        ("numbers before the tensors are deprecated since torch 1.5: write `beta=` and `alpha=`",
         "把系数写在张量之前自 torch 1.5 起已弃用：改用 `beta=` 和 `alpha=`"),
        (f"torch.addmm(0.5, {_A}, 2.0, {_A}, {_A})", f"torch.addmm({_A}, {_A}, {_A}, beta=0.5, alpha=2.0)"),
        deprecated="1.5", runs="UserWarning"),
    row("FLB197", "named tensors", _FACTORIES, _names_argument,
        ("named tensors are gone since torch 2.13: `names=` raises", "命名张量自 torch 2.13 起已移除：`names=` 报错"),
        ("torch.zeros(2, 3, names=('N', 'C'))", "torch.zeros(2, 3)"),
        deprecated="2.11", removed="2.13", runs=_NO_ARGUMENT),
    row("FLB1200", "betas of int", ("torch.optim.Adam", "torch.optim.AdamW"), _whole_betas,
        ("an int in `betas=` of Adam raises since torch 2.6: write `0.0`", "Adam 的 `betas=` 含整数自 torch 2.6 起报错：改用 `0.0`"),
        ("import torch\n\nout = torch.optim.Adam([torch.ones(2)], betas=(0, 0.9)).defaults['betas'][0]\n",
         "import torch\n\nout = torch.optim.Adam([torch.ones(2)], betas=(0.0, 0.9)).defaults['betas'][0]\n"),
        removed="2.6", fix="safe", runs="ValueError"),
    row("FLB430", "dropout of one layer", ("torch.nn.LSTM", "torch.nn.GRU", "torch.nn.RNN"), _lstm_dropout,
        ("`dropout=` of a recurrent network of one layer does nothing: it is between layers",
         "单层循环网络的 `dropout=` 不起作用：它只作用于层与层之间"),
        ("nn.LSTM(4, 4, dropout=0.5)", "nn.LSTM(4, 4, num_layers=2, dropout=0.5)"), runs="UserWarning"),
    row("FLB198", "RandomRotation resample", ("torchvision.transforms.RandomRotation", "torchvision.transforms.RandomAffine"),
        rename("resample", "interpolation", is_safe=False),
        ("`resample=` is gone since torchvision 0.14: write `interpolation=InterpolationMode...`",
         "`resample=` 自 torchvision 0.14 起已移除：改用 `interpolation=InterpolationMode...`"),
        ("import torchvision.transforms as T\n\nout = T.RandomRotation(5, resample=False)",
         "import torchvision.transforms as T\n\nout = T.RandomRotation(5, interpolation=False)"),
        library="torchvision", deprecated="0.12", removed="0.14", fix="unsafe", runs=_NO_ARGUMENT),
    row("FLB199", "RandomAffine fillcolor", ("torchvision.transforms.RandomAffine",), rename("fillcolor", "fill"),
        ("`fillcolor=` is gone since torchvision 0.14: write `fill=`", "`fillcolor=` 自 torchvision 0.14 起已移除：改用 `fill=`"),
        ("import torchvision.transforms as T\n\nout = T.RandomAffine(5, fillcolor=0).fill",
         "import torchvision.transforms as T\n\nout = T.RandomAffine(5, fill=0).fill"),
        library="torchvision", deprecated="0.12", removed="0.14", fix="safe", runs=_NO_ARGUMENT),
    row("FLB1100", "save_image range", ("torchvision.utils.save_image", "torchvision.utils.make_grid"),
        rename("range", "value_range"),
        ("`range=` is gone since torchvision 0.14: write `value_range=`",
         "`range=` 自 torchvision 0.14 起已移除：改用 `value_range=`"),
        ("import torch\nfrom torchvision.utils import make_grid\n\nout = make_grid(torch.ones(1, 3, 2, 2), range=(0, 1))",
         "import torch\nfrom torchvision.utils import make_grid\n\nout = make_grid(torch.ones(1, 3, 2, 2), value_range=(0, 1))"),
        library="torchvision", deprecated="0.9", removed="0.14", fix="safe", runs=_NO_ARGUMENT),
    row("FLB1101", "rotate resample", ("torchvision.transforms.functional.rotate", "torchvision.transforms.functional.affine"),
        rename("resample", "interpolation", is_safe=False),
        ("`resample=` is gone since torchvision 0.14: write `interpolation=`",
         "`resample=` 自 torchvision 0.14 起已移除：改用 `interpolation=`"),
        ("import torchvision.transforms.functional as TF\n\n\ndef turn(image):\n    return TF.rotate(image, 5, resample=0)\n",
         "import torchvision.transforms.functional as TF\n\n\ndef turn(image):\n    return TF.rotate(image, 5, interpolation=0)\n"),
        library="torchvision", deprecated="0.12", removed="0.14", fix="unsafe", runs=_NO_ARGUMENT),
    row("FLB1102", "ImageNet download", ("torchvision.datasets.ImageNet",), drop("download"),
        ("`download=` of ImageNet is gone since torchvision 0.12: get the archives yourself",
         "ImageNet 的 `download=` 自 torchvision 0.12 起已移除：请自行取得压缩包"),
        ("from torchvision import datasets\n\n\ndef images(root):\n    return datasets.ImageNet(root, download=False)\n",
         "from torchvision import datasets\n\n\ndef images(root):\n    return datasets.ImageNet(root)\n"),
        library="torchvision", deprecated="0.6", removed="0.12", fix="safe", runs=_NO_ARGUMENT),
]  # fmt: skip

# What is looked at through other nodes than a call of a known name.
_METHODS: list[Rule] = [
    Rule(
        "FLB1103", "sampler-data-source",
        "`super().__init__(data_source)` of a Sampler raises since torch 2.10: call it without",
        "Sampler 的 `super().__init__(data_source)` 自 torch 2.10 起报错：不要再传参数",
        "import torch\nfrom torch.utils.data import Sampler\n\n\nclass Order(Sampler):\n"
        "    def __init__(self, data):\n        super().__init__(data)\n\n\nout = Order([1])\n",
        "import torch\nfrom torch.utils.data import Sampler\n\n\nclass Order(Sampler):\n"
        "    def __init__(self, data):\n        super().__init__()\n\n\nout = Order([1])\n",
        deprecated="2.1", removed="2.10", fix="safe", runs="TypeError", whole=True, check=_data_source,
    ),
    Rule(
        "FLB2145", "register-backward-hook",
        "`register_backward_hook` is deprecated since torch 1.8, and sees wrong gradients of modules of several"
        " operations: write `register_full_backward_hook`",
        "`register_backward_hook` 自 torch 1.8 起已弃用，对多步运算的模块会得到错误的梯度：改用 `register_full_backward_hook`",
        "import torch  # noqa: F401\n\n\ndef hook(net):\n    net.register_backward_hook(print)\n    return net\n",
        "import torch  # noqa: F401\n\n\ndef hook(net):\n    net.register_full_backward_hook(print)\n    return net\n",
        deprecated="1.8", runs="FutureWarning", attributes=("register_backward_hook",), check=_hook,
    ),
    Rule(
        "FLB2146", "positional-state-dict",
        "positional arguments of `state_dict` are deprecated since torch 1.12: name them, or write `load_state_dict`"
        " if weights were to be loaded",
        "`state_dict` 的位置参数自 torch 1.12 起已弃用：请写明参数名；若要载入权重，应为 `load_state_dict`",
        "import torch\n\nnet = torch.nn.Linear(2, 2)\nout = net.state_dict({}, 'net.')\n",
        "import torch\n\nnet = torch.nn.Linear(2, 2)\nout = net.state_dict(destination={}, prefix='net.')\n",
        deprecated="1.12", runs="FutureWarning", attributes=("state_dict",), check=_positional_state_dict,
    ),
]  # fmt: skip

RULES: list[Rule] = [*_ARGUMENTS, *_METHODS]
"""One rule per argument."""
