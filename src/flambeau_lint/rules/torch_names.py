"""Names of torch.nn, torch.optim, torch.utils, torch.cuda and torch.distributed."""

import ast
from collections.abc import Iterator
from dataclasses import replace

from flambeau_lint.program import Program
from flambeau_lint.renaming import finding, name_fix, renamed_with
from flambeau_lint.rule import Finding, Rule
from flambeau_lint.rules.rows import gone, moved, old

_ERR = "ModuleNotFoundError"
_DIST = "import torch.distributed as dist\n\n\n"
_PAIR = "\n\nclass Pair:\n    def __init__(self, left, right):\n        self.left = left\n        self.right = right\n\n\n"
_BILINEAR = renamed_with("mode='bilinear'", "align_corners=True")


def _wrapped(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """Wrapper(net), but not isinstance(net, Wrapper), nor one of its functions."""
    assert isinstance(node, ast.Call)
    yield finding(program, rule, node.func)


def _norm(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """A norm as parametrization; not where the file removes it again, which is another function there."""
    remove = f"remove_{rule.names[0].rpartition('.')[2]}"
    is_removed = remove in program.attributes or program.is_bound(remove)
    yield finding(program, rule, node, None if is_removed else name_fix(program, rule, node))


def _renamed_for_a_while(code: str, name: str) -> Rule:
    """F.sigmoid and F.tanh: what torch 2.0 has taken back is no more than a matter of taste."""
    of_nn = f"torch.nn.functional.{name}"
    of_torch = f"torch.{name}"
    good = f"import torch\nimport torch.nn.functional as F\n\nout = {of_torch}(torch.ones(2))\n"
    en = f"`{of_nn}` was deprecated from torch 0.4 to 1.13, and is another name of `{of_torch}` since"
    zh = f"`{of_nn}` 在 torch 0.4 至 1.13 中曾弃用，此后是 `{of_torch}` 的别名"
    bad = f"F.{name}(torch.ones(2))"
    return old(code, of_nn, "0.4", of_torch, bad, good, fix="safe", en=en, zh=zh, preview=True)


RULES: list[Rule] = [
    gone("FLB120", "torch.nn.CrossEntropyLoss2d", "1.0", "torch.nn.CrossEntropyLoss",
         "nn.CrossEntropyLoss2d()(torch.ones(1, 2, 3, 3), torch.zeros(1, 3, 3).long())",
         "nn.CrossEntropyLoss()(torch.ones(1, 2, 3, 3), torch.zeros(1, 3, 3).long())", fix="safe"),
    gone("FLB121", "torch.optim.swa_utils.swa_bn", "1.6", "torch.optim.swa_utils.update_bn",
         "from torch.optim.swa_utils import swa_bn\n\nout = swa_bn",
         "from torch.optim.swa_utils import update_bn\n\nout = update_bn",
         fix="safe", runs="ImportError"),
    gone("FLB122", "torch.hub._download_url_to_file", "1.12", "torch.hub.download_url_to_file",
         "torch.hub._download_url_to_file", "torch.hub.download_url_to_file", fix="safe"),
    gone("FLB123", "torch.utils.bottleneck", "2.10", "torch.profiler", "import torch.utils.bottleneck",
         "import torch.profiler", deprecated="2.9", runs=_ERR),
    gone("FLB124", "torch.utils.ffi", "1.12", "torch.utils.cpp_extension",
         "from torch.utils.ffi import create_extension", "from torch.utils.cpp_extension import CppExtension",
         deprecated="1.0", runs=_ERR),
    gone("FLB125", "torch.utils.trainer", "1.0", "", "import torch.utils.trainer", "import torch.utils.data",
         runs=_ERR),
    gone("FLB126", "torch.legacy", "1.4", "torch.nn", "import torch.legacy.nn", "import torch.nn",
         deprecated="0.4", runs=_ERR),
    gone("FLB127", "torch.utils.serialization", "1.4", "", "from torch.utils.serialization import load_lua",
         "import torch.serialization", deprecated="1.0", runs="ImportError",
         why="Files of Lua's torch are read by the package torchfile."),
    gone("FLB128", "torch.testing.make_non_contiguous", "1.9", "torch.testing.make_tensor",
         "torch.testing.make_non_contiguous(torch.ones(2))",
         "torch.testing.make_tensor((2,), dtype=torch.float32, device='cpu', noncontiguous=True)"),
    gone("FLB129", "torch.testing.get_all_dtypes", "1.9", "", "torch.testing.get_all_dtypes()",
         "(torch.float32, torch.float64)"),
    gone("FLB130", "torch._overrides", "1.7", "torch.overrides", "import torch._overrides",
         "import torch.overrides", runs=_ERR),
    gone("FLB131", "torch.storage._TypedStorage", "1.13", "torch.storage.TypedStorage",
         "torch.storage._TypedStorage", "torch.storage.TypedStorage", fix="safe"),
    old("FLB288", "torch.cuda.reset_max_memory_allocated", "1.4", "torch.cuda.reset_peak_memory_stats",
         "import torch\n\n\ndef reset():\n    torch.cuda.reset_max_memory_allocated()\n",
         "import torch\n\n\ndef reset():\n    torch.cuda.reset_peak_memory_stats()\n",
         fix="safe", runs="FutureWarning",
         en="`torch.cuda.reset_max_memory_allocated` is deprecated since torch 1.4 and resets all peaks: write"
         " `torch.cuda.reset_peak_memory_stats`",
         zh="`torch.cuda.reset_max_memory_allocated` 自 torch 1.4 起已弃用，会重置所有峰值：改用"
         " `torch.cuda.reset_peak_memory_stats`"),
    old("FLB289", "torch.cuda.reset_max_memory_cached", "1.4", "torch.cuda.reset_peak_memory_stats",
         "import torch\n\n\ndef reset():\n    torch.cuda.reset_max_memory_cached()\n",
         "import torch\n\n\ndef reset():\n    torch.cuda.reset_peak_memory_stats()\n",
         fix="safe", runs="FutureWarning",
         en="`torch.cuda.reset_max_memory_cached` is deprecated since torch 1.4 and resets all peaks: write"
         " `torch.cuda.reset_peak_memory_stats`",
         zh="`torch.cuda.reset_max_memory_cached` 自 torch 1.4 起已弃用，会重置所有峰值：改用"
         " `torch.cuda.reset_peak_memory_stats`"),
    gone("FLB134", "torch.distributed.pipeline", "2.4", "torch.distributed.pipelining",
         "from torch.distributed.pipeline.sync import Pipe", "import torch.distributed.pipelining",
         deprecated="2.3", runs=_ERR),
    gone("FLB135", "torch.distributed.all_gather_multigpu", "2.2", "torch.distributed.all_gather",
         "torch.distributed.all_gather_multigpu", "torch.distributed.all_gather", deprecated="1.13",
         why="One process per GPU took the place of several GPUs per process."),
    gone("FLB136", "torch.distributed.all_reduce_multigpu", "2.2", "torch.distributed.all_reduce",
         "torch.distributed.all_reduce_multigpu", "torch.distributed.all_reduce", deprecated="1.13"),
    gone("FLB137", "torch.distributed.broadcast_multigpu", "2.2", "torch.distributed.broadcast",
         "torch.distributed.broadcast_multigpu", "torch.distributed.broadcast", deprecated="1.13"),
    gone("FLB138", "torch.distributed.reduce_multigpu", "2.2", "torch.distributed.reduce",
         "torch.distributed.reduce_multigpu", "torch.distributed.reduce", deprecated="1.13"),
    gone("FLB139", "torch.distributed.reduce_scatter_multigpu", "2.2", "torch.distributed.reduce_scatter",
         "torch.distributed.reduce_scatter_multigpu", "torch.distributed.reduce_scatter", deprecated="1.13"),
    gone("FLB140", "torch.distributed.deprecated", "1.4", "torch.distributed",
         "import torch.distributed.deprecated", "import torch.distributed", deprecated="1.0", runs=_ERR),
    gone("FLB141", "torch.deploy", "1.13", "", "import torch.deploy", "import torch", runs=_ERR),
    gone("FLB142", "torch.ao.quantization.quantize_pt2e", "2.11", "torchao.quantization.pt2e",
         "import torch.ao.quantization.quantize_pt2e", "import torch.ao.quantization", deprecated="2.9",
         runs=_ERR),
    gone("FLB143", "torch.ao.quantization.quantizer", "2.11", "torchao.quantization.pt2e.quantizer",
         "import torch.ao.quantization.quantizer", "import torch.ao.quantization", deprecated="2.9", runs=_ERR),
    gone("FLB144", "torch._export.capture_pre_autograd_graph", "2.7", "torch.export.export",
         "from torch._export import capture_pre_autograd_graph", "from torch.export import export",
         deprecated="2.5", runs="ImportError"),
    gone("FLB145", "torch.export.export_for_training", "2.11", "torch.export.export",
         "from torch.export import export_for_training\n\nout = export_for_training",
         "from torch.export import export\n\nout = export",
         deprecated="2.9", fix="unsafe", runs="ImportError"),
    gone("FLB146", "torch.export.export_for_inference", "2.8", "torch.export.export",
         "from torch.export import export_for_inference", "from torch.export import export",
         deprecated="2.7", runs="ImportError", why="run_decompositions() of what export returns follows it."),
    gone("FLB147", "torch.export.dynamic_dim", "2.5", "torch.export.Dim", "from torch.export import dynamic_dim",
         "from torch.export import Dim", deprecated="2.2", runs="ImportError"),
    gone("FLB148", "torch.export.constrain_as_size", "2.2", "torch._check",
         "from torch.export import constrain_as_size", "import torch\n\ntorch._check(True)",
         deprecated="2.1", runs="ImportError"),
    gone("FLB149", "torch.onnx.dynamo_export", "2.9", "torch.onnx.export(dynamo=True)",
         "import torch.onnx\n\ntorch.onnx.dynamo_export", "import torch.onnx\n\ntorch.onnx.export",
         deprecated="2.6"),
    gone("FLB150", "torch.onnx.ExportOptions", "2.9", "",
         "import torch.onnx\n\ntorch.onnx.ExportOptions", "import torch.onnx\n\ntorch.onnx.export",
         deprecated="2.6", why="Its fields are arguments of torch.onnx.export."),
    gone("FLB151", "torch.onnx.enable_fake_mode", "2.9", "",
         "import torch.onnx\n\ntorch.onnx.enable_fake_mode", "from torch._subclasses import FakeTensorMode",
         deprecated="2.6"),
    gone("FLB152", "torch.onnx._export", "2.11", "torch.onnx.export", "import torch.onnx\n\ntorch.onnx._export",
         "import torch.onnx\n\ntorch.onnx.export"),
    gone("FLB153", "torch.onnx.symbolic_registry", "1.13", "torch.onnx.register_custom_op_symbolic",
         "import torch.onnx.symbolic_registry", "from torch.onnx import register_custom_op_symbolic",
         deprecated="1.12", runs=_ERR),
    gone("FLB154", "torch.onnx.verification.verify", "2.9", "torch.onnx.verification.verify_onnx_program",
         "from torch.onnx.verification import verify", "from torch.onnx.verification import verify_onnx_program",
         deprecated="2.7", runs="ImportError"),
    gone("FLB155", "torch.fx.experimental.fx_acc", "1.12", "torch_tensorrt", "import torch.fx.experimental.fx_acc",
         "import torch.fx.experimental", deprecated="1.11", runs=_ERR),
    gone("FLB156", "torch.fx.experimental.fx2trt", "1.12", "torch_tensorrt", "import torch.fx.experimental.fx2trt",
         "import torch.fx.experimental", deprecated="1.11", runs=_ERR),
    gone("FLB157", "torch.utils.mobile_optimizer", "2.14", "ExecuTorch",
         "import torch\nfrom torch.utils.mobile_optimizer import optimize_for_mobile\n\n\n"
         "def export(net, x):\n    return optimize_for_mobile(torch.jit.trace(net, x))\n",
         "import torch\n\n\ndef export(net, x):\n    return torch.export.export(net, (x,))\n",
         deprecated="2.10", runs="RuntimeError", en="`torch.utils.mobile_optimizer` is deprecated since torch 2.10, and"
         " fails in the Linux wheels since 2.14: ExecuTorch has taken its place",
         zh="`torch.utils.mobile_optimizer` 自 torch 2.10 起已弃用，且 2.14 起的 Linux 安装包中会出错：改用 ExecuTorch"),
    _renamed_for_a_while("FLB215", "sigmoid"),
    _renamed_for_a_while("FLB216", "tanh"),
    old("FLB217", "torch.nn.functional.upsample", "0.4.1", "torch.nn.functional.interpolate",
        "F.upsample(torch.ones(1, 1, 2, 2), scale_factor=2)",
        "F.interpolate(torch.ones(1, 1, 2, 2), scale_factor=2)", fix="safe", runs="UserWarning"),
    old("FLB218", "torch.nn.functional.upsample_bilinear", "0.4.1", "torch.nn.functional.interpolate",
        "F.upsample_bilinear(torch.ones(1, 1, 2, 2), scale_factor=2)",
        "F.interpolate(torch.ones(1, 1, 2, 2), scale_factor=2, mode='bilinear', align_corners=True)",
        fix="safe", runs="UserWarning",
        en="`torch.nn.functional.upsample_bilinear` is deprecated since torch 0.4.1: write"
        " `interpolate(..., mode='bilinear', align_corners=True)`",
        zh="`torch.nn.functional.upsample_bilinear` 自 torch 0.4.1 起已弃用：改用"
        " `interpolate(..., mode='bilinear', align_corners=True)`",
        check=_BILINEAR),
    old("FLB219", "torch.nn.functional.upsample_nearest", "0.4.1", "torch.nn.functional.interpolate",
        "F.upsample_nearest(torch.ones(1, 1, 2, 2), scale_factor=2)",
        "F.interpolate(torch.ones(1, 1, 2, 2), scale_factor=2)", fix="safe", runs="UserWarning"),
    old("FLB220", "torch.nn.UpsamplingBilinear2d", "0.4.1", "torch.nn.Upsample",
        "nn.UpsamplingBilinear2d(scale_factor=2)(torch.ones(1, 1, 2, 2))",
        "nn.Upsample(scale_factor=2, mode='bilinear', align_corners=True)(torch.ones(1, 1, 2, 2))", fix="safe",
        en="`torch.nn.UpsamplingBilinear2d` is deprecated since torch 0.4.1, without a warning: write"
        " `torch.nn.Upsample(..., mode='bilinear', align_corners=True)`",
        zh="`torch.nn.UpsamplingBilinear2d` 自 torch 0.4.1 起已弃用，且没有警告：改用"
        " `torch.nn.Upsample(..., mode='bilinear', align_corners=True)`",
        check=_BILINEAR),
    old("FLB221", "torch.nn.UpsamplingNearest2d", "0.4.1", "torch.nn.Upsample",
        "nn.UpsamplingNearest2d(scale_factor=2)(torch.ones(1, 1, 2, 2))",
        "nn.Upsample(scale_factor=2)(torch.ones(1, 1, 2, 2))", fix="safe"),
    old("FLB222", "torch.nn.NLLLoss2d", "1.0", "torch.nn.NLLLoss",
        "nn.NLLLoss2d()(torch.zeros(1, 2, 3, 3), torch.zeros(1, 3, 3).long())",
        "nn.NLLLoss()(torch.zeros(1, 2, 3, 3), torch.zeros(1, 3, 3).long())", fix="safe", runs="FutureWarning"),
    old("FLB223", "torch.nn.Container", "1.0", "torch.nn.Module", "nn.Container()", "nn.Module()",
        runs="FutureWarning"),
    replace(
        old("FLB224", "torch.nn.DataParallel", "1.5", "torch.nn.parallel.DistributedDataParallel",
            "nn.DataParallel(nn.Linear(2, 2))", "nn.parallel.DistributedDataParallel",
            why="One process feeds all GPUs through one interpreter; torch's own pages advise"
            " DistributedDataParallel, also on one machine.",
            en="`torch.nn.DataParallel` is slower than `torch.nn.parallel.DistributedDataParallel`, which torch's"
            " documentation advises since 1.5",
            zh="`torch.nn.DataParallel` 比 `torch.nn.parallel.DistributedDataParallel` 慢，torch 文档自 1.5 起建议用后者"),
        names=(), calls=("torch.nn.DataParallel", "torch.nn.parallel.DataParallel"), check=_wrapped, preview=True,
    ),
    old("FLB225", "torch.nn.utils.clip_grad_norm", "0.4", "torch.nn.utils.clip_grad_norm_",
        "nn.utils.clip_grad_norm(nn.Linear(2, 2).parameters(), 1.0)",
        "nn.utils.clip_grad_norm_(nn.Linear(2, 2).parameters(), 1.0)", fix="safe", runs="FutureWarning"),
    old("FLB226", "torch.nn.utils.weight_norm", "2.1", "torch.nn.utils.parametrizations.weight_norm",
        "nn.utils.weight_norm(nn.Linear(2, 3))(torch.ones(2))",
        "nn.utils.parametrizations.weight_norm(nn.Linear(2, 3))(torch.ones(2))", fix="unsafe",
        runs="FutureWarning",
        why="The keys of state_dict change: weight_g and weight_v become parametrizations.weight.original0 and"
        " original1. Old checkpoints are still read, by a hook of torch; remove_weight_norm no longer applies.",
        check=_norm),
    old("FLB227", "torch.nn.utils.spectral_norm", "1.9", "torch.nn.utils.parametrizations.spectral_norm",
        "nn.utils.spectral_norm(nn.Linear(2, 3)).eval()(torch.ones(2)).shape",
        "nn.utils.parametrizations.spectral_norm(nn.Linear(2, 3)).eval()(torch.ones(2)).shape", fix="unsafe",
        why="The keys of state_dict change.",
        en="`torch.nn.utils.spectral_norm` has a successor since torch 1.9, and its documentation says that it will be"
        " deprecated: write `torch.nn.utils.parametrizations.spectral_norm`",
        zh="`torch.nn.utils.spectral_norm` 自 torch 1.9 起有了后继，文档称它将被弃用：改用"
        " `torch.nn.utils.parametrizations.spectral_norm`",
        check=_norm),
    old("FLB228", "torch.nn.utils.stateless.functional_call", "2.0", "torch.func.functional_call",
        "import torch\nfrom torch.nn.utils.stateless import functional_call\n\n"
        "out = functional_call(torch.nn.ReLU(), {}, (torch.ones(2),))",
        "import torch\nfrom torch.func import functional_call\n\n"
        "out = functional_call(torch.nn.ReLU(), {}, (torch.ones(2),))", fix="safe", runs="FutureWarning"),
    *[
        old(f"FLB{230 + number}", f"torch.nn.init.{name}", "0.4", f"torch.nn.init.{name}_",
            f"nn.init.{name}({arguments})", f"nn.init.{name}_({arguments})", fix="safe", runs="FutureWarning")
        for number, (name, arguments) in enumerate((
            ("uniform", "torch.empty(2, 2)"),
            ("normal", "torch.empty(2, 2)"),
            ("constant", "torch.empty(2, 2), 0.5"),
            ("eye", "torch.empty(2, 2)"),
            ("dirac", "torch.empty(2, 2, 3)"),
            ("xavier_uniform", "torch.empty(2, 2)"),
            ("xavier_normal", "torch.empty(2, 2)"),
            ("kaiming_uniform", "torch.empty(2, 2)"),
            ("kaiming_normal", "torch.empty(2, 2)"),
            ("orthogonal", "torch.empty(2, 2)"),
            ("sparse", "torch.empty(4, 4), 0.5"),
        ))
    ],
    old("FLB242", "torch.optim.lr_scheduler._LRScheduler", "2.0", "torch.optim.lr_scheduler.LRScheduler",
        "from torch.optim.lr_scheduler import _LRScheduler\n\nout = issubclass(_LRScheduler, object)",
        "from torch.optim.lr_scheduler import LRScheduler\n\nout = issubclass(LRScheduler, object)", fix="safe",
        why="The old name is a subclass of the new one: isinstance(x, _LRScheduler) is false for all that"
        " torch makes since 2.0."),
    old("FLB243", "torch.optim._multi_tensor", "1.12", "", "import torch.optim._multi_tensor",
        "import torch.optim", why="`foreach=True` of each optimizer has taken its place."),
    old("FLB244", "torch.cuda.memory_cached", "1.4", "torch.cuda.memory_reserved",
        "torch.cuda.memory_cached()", fix="safe", runs="FutureWarning"),
    old("FLB245", "torch.cuda.max_memory_cached", "1.4", "torch.cuda.max_memory_reserved",
        "torch.cuda.max_memory_cached()", fix="safe", runs="FutureWarning"),
    old("FLB246", "torch.backends.cuda.matmul.allow_tf32", "2.9", "torch.backends.cuda.matmul.fp32_precision",
        "torch.backends.cuda.matmul.allow_tf32", "torch.backends.cuda.matmul.fp32_precision",
        en="`torch.backends.cuda.matmul.allow_tf32` is deprecated since torch 2.9: `fp32_precision`, which is 'tf32'"
        " for True and 'ieee' for False",
        zh="`torch.backends.cuda.matmul.allow_tf32` 自 torch 2.9 起已弃用：改用 `fp32_precision`，True 即 'tf32'，False 即"
        " 'ieee'",
        why="Setting the old and the new name in one program raises in some orders."),
    old("FLB247", "torch.backends.cudnn.allow_tf32", "2.9", "torch.backends.cudnn.conv.fp32_precision",
        "torch.backends.cudnn.allow_tf32", "torch.backends.cudnn.conv.fp32_precision",
        en="`torch.backends.cudnn.allow_tf32` is deprecated since torch 2.9: `conv.fp32_precision` and"
        " `rnn.fp32_precision`, which are 'tf32' for True and 'ieee' for False",
        zh="`torch.backends.cudnn.allow_tf32` 自 torch 2.9 起已弃用：改用 `conv.fp32_precision` 与 `rnn.fp32_precision`，"
        "True 即 'tf32'，False 即 'ieee'"),
    old("FLB248", "torch.distributed.reduce_op", "1.0", "torch.distributed.ReduceOp",
        "import torch.distributed as dist\n\nout = dist.reduce_op.SUM",
        "import torch.distributed as dist\n\nout = dist.ReduceOp.SUM", fix="safe", runs="FutureWarning"),
    old("FLB249", "torch.distributed._all_gather_base", "1.13", "torch.distributed.all_gather_into_tensor",
        f"{_DIST}def gather(out, x):\n    dist._all_gather_base(out, x)\n",
        f"{_DIST}def gather(out, x):\n    dist.all_gather_into_tensor(out, x)\n", fix="safe",
        runs="FutureWarning"),
    old("FLB250", "torch.distributed._reduce_scatter_base", "1.13", "torch.distributed.reduce_scatter_tensor",
        f"{_DIST}def scatter(out, x):\n    dist._reduce_scatter_base(out, x)\n",
        f"{_DIST}def scatter(out, x):\n    dist.reduce_scatter_tensor(out, x)\n", fix="safe",
        runs="FutureWarning"),
    moved("FLB251", "torch.distributed._tensor", "2.5", "torch.distributed.tensor",
          "from torch.distributed._tensor import DTensor", lacks="api ops dispatch op_schema random redistribute sharding_prop", fix="safe"),
    moved("FLB252", "torch.distributed._composable.fsdp", "2.6", "torch.distributed.fsdp",
          "from torch.distributed._composable.fsdp import fully_shard", fix="safe"),
    old("FLB253", "torch.distributed._sharded_tensor", "1.11", "torch.distributed.tensor",
        "import torch.distributed._sharded_tensor", "import torch.distributed.tensor",
        runs="DeprecationWarning", en="`torch.distributed._sharded_tensor` is deprecated since torch 1.11:"
        " `torch.distributed._shard.sharded_tensor` has the same classes, `torch.distributed.tensor` the DTensor that"
        " took their place",
        zh="`torch.distributed._sharded_tensor` 自 torch 1.11 起已弃用：同样的类在"
        " `torch.distributed._shard.sharded_tensor` 中，取代它们的 DTensor 在 `torch.distributed.tensor` 中"),
    old("FLB254", "torch.distributed._shard.checkpoint", "2.0", "torch.distributed.checkpoint",
        "import torch.distributed._shard.checkpoint", "import torch.distributed.checkpoint",
        runs="DeprecationWarning"),
    old("FLB255", "torch.distributed.checkpoint.save_state_dict", "2.2", "torch.distributed.checkpoint.save",
        "from torch.distributed.checkpoint import save_state_dict\n\n\n"
        "def write(state, writer):\n    save_state_dict(state, writer)\n",
        "from torch.distributed.checkpoint import save\n\n\n"
        "def write(state, writer):\n    save(state, storage_writer=writer)\n", runs="FutureWarning"),
    old("FLB256", "torch.distributed.checkpoint.load_state_dict", "2.2", "torch.distributed.checkpoint.load",
        "from torch.distributed.checkpoint import load_state_dict\n\n\n"
        "def read(state, reader):\n    load_state_dict(state, reader)\n",
        "from torch.distributed.checkpoint import load\n\n\n"
        "def read(state, reader):\n    load(state, storage_reader=reader)\n", runs="FutureWarning"),
    replace(
        old("FLB257", "torch.distributed.fsdp.FullyShardedDataParallel", "2.6", "torch.distributed.fsdp.fully_shard",
            "from torch.distributed.fsdp import FullyShardedDataParallel\n\n\ndef shard(net):\n"
            "    return FullyShardedDataParallel(net)\n",
            "from torch.distributed.fsdp import fully_shard\n\n\ndef shard(net):\n    return fully_shard(net)\n",
            runs="FutureWarning",
            en="`FullyShardedDataParallel` (FSDP1) has a successor since torch 2.6, to which torch's documentation"
            " advises to migrate: `torch.distributed.fsdp.fully_shard`",
            zh="`FullyShardedDataParallel`（FSDP1）自 torch 2.6 起有了后继，torch 文档建议迁移到"
            " `torch.distributed.fsdp.fully_shard`",
            why="fully_shard keeps the names of parameters, and shards each of them instead of flat ones."),
        names=(), check=_wrapped, preview=True,
        calls=("torch.distributed.fsdp.FullyShardedDataParallel",
               "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel"),
    ),
    old("FLB258", "torch.nn.parallel.DistributedDataParallelCPU", "1.4",
        "torch.nn.parallel.DistributedDataParallel",
        "from torch import nn\n\n\ndef wrap(net):\n    return nn.parallel.DistributedDataParallelCPU(net)\n",
        "from torch import nn\n\n\ndef wrap(net):\n    return nn.parallel.DistributedDataParallel(net)\n",
        fix="unsafe", runs="FutureWarning"),
    old("FLB259", "torch.jit.script", "2.10", "torch.compile", "import torch\n\nout = torch.jit.script(torch.nn.ReLU())",
        "import torch\n\nout = torch.compile", runs="FutureWarning",
        en="`torch.jit.script` is deprecated since torch 2.10: `torch.compile` makes a model faster, `torch.export` makes"
        " a file",
        zh="`torch.jit.script` 自 torch 2.10 起已弃用：加速模型用 `torch.compile`，导出文件用 `torch.export`",
        why="TorchScript gets no more work; what reads its files, such as a program in C++, changes with it."),
    old("FLB260", "torch.jit.trace", "2.10", "torch.export.export",
        "torch.jit.trace(torch.nn.ReLU(), torch.ones(2))",
        "torch.export.export(torch.nn.ReLU(), (torch.ones(2),))", runs="FutureWarning",
        en="`torch.jit.trace` is deprecated since torch 2.10: `torch.compile` makes a model faster, `torch.export` makes"
        " a file, which other functions read than those of TorchScript",
        zh="`torch.jit.trace` 自 torch 2.10 起已弃用：加速模型用 `torch.compile`，导出文件用 `torch.export`，"
        "其文件不由 TorchScript 的函数读取"),
    old("FLB261", "torch.jit.load", "2.10", "torch.export.load",
        "import torch\n\nnet = torch.jit.load('net.pt')\n",
        "import torch\n\nnet = torch.export.load('net.pt2').module()\n", runs="FutureWarning",
        en="`torch.jit.load` reads TorchScript, which is deprecated since torch 2.10: export the model anew with"
        " `torch.export`, whose `load` does not read such a file",
        zh="`torch.jit.load` 读取的 TorchScript 自 torch 2.10 起已弃用：用 `torch.export` 重新导出模型，它的 `load`"
        " 读不了这种文件"),
    old("FLB262", "torch.jit.freeze", "2.11", "torch.export.export",
        "import torch\n\n\ndef frozen(net, x):\n    return torch.jit.freeze(torch.jit.trace(net, x))\n",
        "import torch\n\n\ndef frozen(net, x):\n    return torch.export.export(net, (x,)).module()\n",
        runs="FutureWarning"),
    old("FLB263", "torch.jit.script_method", "2.10", "torch.compile",
        "import torch\n\n\nclass Net(torch.jit.ScriptModule):\n    @torch.jit.script_method\n"
        "    def forward(self, x):\n        return x + 1\n\n\nnet = Net()\n",
        "import torch\n\n\nclass Net(torch.nn.Module):\n    def forward(self, x):\n        return x + 1\n\n\n"
        "net = torch.compile(Net())\n", runs="FutureWarning",
        en="`torch.jit.script_method` is deprecated since torch 2.10: drop it, and write `torch.compile` around the"
        " module",
        zh="`torch.jit.script_method` 自 torch 2.10 起已弃用：删去，并对整个模块用 `torch.compile`"),
    moved("FLB264", "torch.quantization", "1.10", "torch.ao.quantization",
          "import torch.quantization\n\nout = torch.quantization.QConfig",
          "import torch.ao.quantization\n\nout = torch.ao.quantization.QConfig", fix="safe",
          why="The old module is an alias that warns since 2.8; torchao is where quantization is developed."),
    old("FLB265", "torch.ao.quantization.quantize_dynamic", "2.8", "torchao.quantization.quantize_",
        "import torch\n\nnet = torch.nn.Sequential(torch.nn.Linear(64, 64))\n"
        "net = torch.ao.quantization.quantize_dynamic(net)\n",
        "import torch\nfrom torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_\n\n"
        "net = torch.nn.Sequential(torch.nn.Linear(64, 64))\n"
        "quantize_(net, Int8DynamicActivationInt8WeightConfig())\n", runs="DeprecationWarning"),
    moved("FLB266", "torch.nn.quantized", "1.13", "torch.ao.nn.quantized", "import torch.nn.quantized",
          fix="safe"),
    moved("FLB267", "torch.nn.intrinsic", "1.13", "torch.ao.nn.intrinsic", "import torch.nn.intrinsic",
          fix="safe"),
    moved("FLB268", "torch.nn.qat", "1.13", "torch.ao.nn.qat", "import torch.nn.qat", fix="safe"),
    moved("FLB269", "torch.nn.quantizable", "1.13", "torch.ao.nn.quantizable", "import torch.nn.quantizable",
          fix="safe"),
    old("FLB270", "torch.onnx.OperatorExportTypes", "2.9", "",
        "import torch.onnx\n\ntorch.onnx.OperatorExportTypes", "import torch.onnx\n\ntorch.onnx.export"),
    old("FLB271", "torch.utils.model_zoo.load_url", "1.1", "torch.hub.load_state_dict_from_url",
        "import torch.utils.model_zoo as model_zoo\n\nout = model_zoo.load_url",
        "import torch\nimport torch.utils.model_zoo as model_zoo\n\nout = torch.hub.load_state_dict_from_url",
        fix="safe",
        en="`torch.utils.model_zoo.load_url` has moved since torch 1.1: write `torch.hub.load_state_dict_from_url`",
        zh="`torch.utils.model_zoo.load_url` 自 torch 1.1 起已迁移：改用 `torch.hub.load_state_dict_from_url`"),
    old("FLB272", "torch.utils._pytree._register_pytree_node", "2.2", "torch.utils._pytree.register_pytree_node",
        f"from torch.utils._pytree import _register_pytree_node\n{_PAIR}"
        "_register_pytree_node(Pair, lambda pair: ([pair.left, pair.right], None), lambda both, _: Pair(*both))\n",
        f"from torch.utils._pytree import register_pytree_node\n{_PAIR}"
        "register_pytree_node(Pair, lambda pair: ([pair.left, pair.right], None), lambda both, _: Pair(*both))\n",
        runs="FutureWarning"),
    old("FLB273", "torch.testing.assert_allclose", "1.12", "torch.testing.assert_close",
        "torch.testing.assert_allclose(torch.ones(2), torch.ones(2))",
        "torch.testing.assert_close(torch.ones(2), torch.ones(2))", fix="unsafe", runs="FutureWarning",
        why="assert_close also compares dtype, device and the kind of object."),
    old("FLB274", "torch.utils.data.dataloader.default_collate", "1.11", "torch.utils.data.default_collate",
        "from torch.utils.data.dataloader import default_collate",
        "from torch.utils.data import default_collate", fix="safe",
        en="`torch.utils.data.dataloader.default_collate` has a public place since torch 1.11: write"
        " `torch.utils.data.default_collate`",
        zh="`torch.utils.data.dataloader.default_collate` 自 torch 1.11 起有了公开的位置：改用"
        " `torch.utils.data.default_collate`"),
    old("FLB275", "torch.utils.data._utils.collate.default_convert", "1.11", "torch.utils.data.default_convert",
        "from torch.utils.data._utils.collate import default_convert",
        "from torch.utils.data import default_convert", fix="safe",
        en="`torch.utils.data._utils.collate.default_convert` has a public place since torch 1.11: write"
        " `torch.utils.data.default_convert`",
        zh="`torch.utils.data._utils.collate.default_convert` 自 torch 1.11 起有了公开的位置：改用"
        " `torch.utils.data.default_convert`"),
    old("FLB276", "torch.utils.data._utils.collate.default_collate", "1.11", "torch.utils.data.default_collate",
        "from torch.utils.data._utils.collate import default_collate",
        "from torch.utils.data import default_collate", fix="safe",
        en="`torch.utils.data._utils.collate.default_collate` has a public place since torch 1.11: write"
        " `torch.utils.data.default_collate`",
        zh="`torch.utils.data._utils.collate.default_collate` 自 torch 1.11 起有了公开的位置：改用"
        " `torch.utils.data.default_collate`"),
    old("FLB277", "torch.backends.cuda.sdp_kernel", "2.3", "torch.nn.attention.sdpa_kernel",
        "import torch\nfrom torch.nn.functional import scaled_dot_product_attention\n\n"
        "x = torch.ones(1, 1, 2, 4)\n"
        "with torch.backends.cuda.sdp_kernel(enable_flash=False, enable_mem_efficient=False):\n"
        "    out = scaled_dot_product_attention(x, x, x)\n",
        "import torch\nfrom torch.nn.functional import scaled_dot_product_attention\n\n"
        "x = torch.ones(1, 1, 2, 4)\n"
        "with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH]):\n"
        "    out = scaled_dot_product_attention(x, x, x)\n", runs="FutureWarning",
        why="sdpa_kernel takes a list of backends in place of three flags."),
    old("FLB278", "torch.FloatStorage", "2.0", "torch.UntypedStorage",
        "list(torch.FloatStorage([1.0, 2.0]))", "torch.tensor([1.0, 2.0]).tolist()",
        runs="UserWarning", en="`torch.FloatStorage` is deprecated since torch 2.0: write `torch.UntypedStorage`, or"
        " `torch.empty(0)` for a tensor of it",
        zh="`torch.FloatStorage` 自 torch 2.0 起已弃用：改用 `torch.UntypedStorage`；由它创建张量时用 `torch.empty(0)`"),
    old("FLB279", "functorch.vmap", "2.0", "torch.vmap",
        "import torch\nfrom functorch import vmap\n\nout = vmap(torch.sin)(torch.ones(2))",
        "import torch\nfrom torch import vmap\n\nout = vmap(torch.sin)(torch.ones(2))", fix="safe",
        runs="FutureWarning"),
    old("FLB280", "functorch.grad", "2.0", "torch.func.grad",
        "import torch\nfrom functorch import grad\n\nout = grad(torch.sin)(torch.tensor(1.0))",
        "import torch\nfrom torch.func import grad\n\nout = grad(torch.sin)(torch.tensor(1.0))", fix="safe",
        runs="FutureWarning"),
    old("FLB281", "functorch.jacrev", "2.0", "torch.func.jacrev",
        "import torch\nfrom functorch import jacrev\n\nout = jacrev(torch.sin)(torch.tensor(1.0))",
        "import torch\nfrom torch.func import jacrev\n\nout = jacrev(torch.sin)(torch.tensor(1.0))", fix="safe",
        runs="FutureWarning"),
    old("FLB282", "functorch.make_functional", "2.0", "torch.func.functional_call",
        "import torch\nfrom functorch import make_functional\n\n"
        "net, weights = make_functional(torch.nn.Linear(2, 1))\nout = net(weights, torch.ones(2)).item()\n",
        "import torch\nfrom torch.func import functional_call\n\nnet = torch.nn.Linear(2, 1)\n"
        "weights = dict(net.named_parameters())\nout = functional_call(net, weights, (torch.ones(2),)).item()\n",
        runs="FutureWarning"),
    old("FLB283", "torch.has_cuda", "2.0", "torch.backends.cuda.is_built()", "torch.has_cuda",
        "torch.backends.cuda.is_built()", runs="UserWarning"),
    old("FLB284", "torch.has_mps", "2.0", "torch.backends.mps.is_built()", "torch.has_mps",
        "torch.backends.mps.is_built()", runs="UserWarning"),
    old("FLB285", "torch.has_cudnn", "2.0", "torch.backends.cudnn.is_available()", "torch.has_cudnn",
        "torch.backends.cudnn.is_available()", runs="UserWarning"),
    old("FLB286", "torch.has_mkldnn", "2.0", "torch.backends.mkldnn.is_available()", "torch.has_mkldnn",
        "torch.backends.mkldnn.is_available()", runs="UserWarning"),
    old("FLB287", "torch.sparse.FloatTensor", "2.1", "torch.sparse_coo_tensor",
        "torch.sparse.FloatTensor(torch.tensor([[0], [1]]), torch.ones(1), torch.Size([2, 2])).to_dense()",
        "torch.sparse_coo_tensor(torch.tensor([[0], [1]]), torch.ones(1), torch.Size([2, 2])).to_dense()",
        fix="unsafe", runs="UserWarning"),
]  # fmt: skip
"""One row per name."""
