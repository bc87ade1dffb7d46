"""Lightning 1.x to 2.x: arguments of Trainer, hooks, and modules that have moved.

Read off the sources of pytorch-lightning 1.5.10 and 1.9.5 and of lightning 2.6.0.
"""

import ast
from collections.abc import Iterator
from typing import Optional

from flambeau_lint import edits
from flambeau_lint.program import Program
from flambeau_lint.renaming import finding
from flambeau_lint.rule import Check, Finding, Fix, Rule
from flambeau_lint.rules.argument_rows import constant, drop, rename, row
from flambeau_lint.rules.rows import gone, moved

_TRAINERS = (
    "pytorch_lightning.Trainer",
    "pytorch_lightning.trainer.Trainer",
    "lightning.Trainer",
    "lightning.pytorch.Trainer",
)
_MODULE_NAMES = {"LightningModule", "LightningDataModule", "Callback"}
_STEP = "self, batch, batch_idx"
_ARGUMENTS = {
    "training_step": _STEP,
    "validation_step": _STEP,
    "test_step": _STEP,
    "on_train_batch_start": _STEP,
    "on_train_batch_end": "self, outputs, batch, batch_idx",
    "on_batch_start": _STEP,
    "on_batch_end": "self, outputs, batch, batch_idx",
    "training_step_end": "self, outputs",
    "validation_step_end": "self, outputs",
    "test_step_end": "self, outputs",
    "training_epoch_end": "self, outputs",
    "validation_epoch_end": "self, outputs",
    "test_epoch_end": "self, outputs",
}
"""Of a hook, if there are any but self."""
_HEAD = "from pytorch_lightning import Trainer\n\ntrainer = Trainer("


def _devices(name: str, accelerator: str) -> Check:
    """gpus=2 as accelerator='gpu', devices=2."""

    def check(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
        assert isinstance(node, ast.Call)
        found = edits.keyword(node, name)
        if found is None:
            return
        number = found.value.operand if isinstance(found.value, ast.UnaryOp) else found.value
        value = constant(number)
        fix: Optional[Fix] = None
        is_free = not edits.keyword(node, "accelerator") and not edits.keyword(node, "devices")
        if is_free and isinstance(value, int) and not isinstance(value, bool) and value:
            text = f"accelerator='{accelerator}', devices={program.source.text_of(found.value)}"
            fix = Fix((edits.replace(program, found, text),))
        yield finding(program, rule, found, fix)

    return check


def _switch(name: str, new: str, off: object) -> Check:
    """progress_bar_refresh_rate=0 as enable_progress_bar=False."""

    def check(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
        assert isinstance(node, ast.Call)
        found = edits.keyword(node, name)
        if found is None:
            return
        is_off = isinstance(found.value, ast.Constant) and found.value.value == off
        is_off = is_off and type(constant(found.value)) is type(off)
        fix = Fix((edits.replace(program, found, f"{new}=False"),)) if is_off else None
        yield finding(program, rule, found, fix)

    return check


def _strategy(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """accelerator='ddp' as strategy='ddp'."""
    assert isinstance(node, ast.Call)
    found = edits.keyword(node, "accelerator")
    value = constant(found.value) if found else None
    if found is None or value not in (
        "ddp",
        "ddp_spawn",
        "dp",
        "ddp2",
        "ddp_sharded",
        "deepspeed",
        "horovod",
    ):
        return
    is_kept = value in ("ddp", "ddp_spawn", "deepspeed") and edits.keyword(node, "strategy") is None
    fix = Fix((edits.rename_keyword(program, found, "strategy"),)) if is_kept else None
    yield finding(program, rule, found, fix)


def _hook(name: str) -> Check:
    """A method of a LightningModule that raises, or that nothing calls any more."""

    def check(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
        for owner in program.classes:
            if not any(_is_lightning(program.dotted(base)) for base in owner.bases):
                continue
            for method in owner.body:
                if isinstance(method, ast.FunctionDef) and method.name == name:
                    yield _at_name(program, rule, method)

    return check


def _optimizer_index(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """training_step(self, batch, batch_idx, optimizer_idx)."""
    for owner in program.classes:
        if not any(_is_lightning(program.dotted(base)) for base in owner.bases):
            continue
        for method in owner.body:
            if not isinstance(method, ast.FunctionDef) or method.name != "training_step":
                continue
            for argument in method.args.args:
                if argument.arg == "optimizer_idx":
                    yield finding(program, rule, argument)


def _is_lightning(dotted: str) -> bool:
    root, _, name = dotted.partition(".")
    return root in ("lightning", "pytorch_lightning") and name.rpartition(".")[2] in _MODULE_NAMES


def _at_name(program: Program, rule: Rule, method: ast.FunctionDef) -> Finding:
    start = program.source.start_of(method)
    place = program.source.data.index(method.name.encode(), start)
    return Finding(rule.code, place, place + len(method.name), rule.en)


def _argument(
    code: str,
    name: str,
    removed: str,
    check: Check,
    use: tuple[str, str, str, str],
    fix: str = "none",
) -> Rule:
    english, chinese, bad, good = use
    return row(
        code,
        f"trainer {name}",
        _TRAINERS,
        check,
        (
            f"`{name}=` of Trainer is gone by Lightning {removed}: {english}",
            f"Trainer 的 `{name}=` 在 Lightning {removed} 中已移除：{chinese}",
        ),
        (f"{_HEAD}{bad})\n", f"{_HEAD}{good})\n"),
        library="lightning",
        removed=removed,
        fix=fix,
        runs="TypeError",
    )


def _dropped(
    code: str, name: str, removed: str, english: str, chinese: str, value: str = "None"
) -> Rule:
    use = (english, chinese, f"{name}={value}", "")
    return _argument(code, name, removed, drop(name, fixes=False), use)


def _method(code: str, name: str, use: str, *, raises: bool) -> Rule:
    what = "raises since Lightning 2.0" if raises else "is never called by Lightning 2.0"
    what_zh = "自 Lightning 2.0 起会报错" if raises else "不会再被 Lightning 2.0 调用"
    more = ", and keep the outputs of the steps yourself" if raises else ""
    more_zh = "，并自行保存各步的输出" if raises else ""
    head = "from pytorch_lightning import LightningModule\n\n\nclass Net(LightningModule):\n"
    return Rule(
        code,
        f"hook-{name.replace('_', '-')}",
        f"the hook `{name}` {what}: write `{use}`{more}",
        f"钩子 `{name}` {what_zh}：改用 `{use}`{more_zh}",
        f"{head}    def {name}({_ARGUMENTS.get(name, 'self')}):\n        pass\n",
        f"{head}    def {use}({_ARGUMENTS.get(use, 'self')}):\n        pass\n",
        library="lightning",
        removed="2.0",
        runs="NotImplementedError" if raises else "silent",
        whole=True,
        check=_hook(name),
    )


RULES: list[Rule] = [
    _argument("FLB1110", "gpus", "2.0", _devices("gpus", "gpu"),
              ("`accelerator='gpu', devices=`", "改用 `accelerator='gpu', devices=`", "gpus=2", "accelerator='gpu', devices=2"), "safe"),
    _argument("FLB1111", "tpu_cores", "2.0", _devices("tpu_cores", "tpu"),
              ("`accelerator='tpu', devices=`", "改用 `accelerator='tpu', devices=`", "tpu_cores=8", "accelerator='tpu', devices=8"), "safe"),
    _argument("FLB1112", "num_processes", "2.0", _devices("num_processes", "cpu"),
              ("`accelerator='cpu', devices=`", "改用 `accelerator='cpu', devices=`", "num_processes=2", "accelerator='cpu', devices=2"), "safe"),
    _argument("FLB1113", "replace_sampler_ddp", "2.0", rename("replace_sampler_ddp", "use_distributed_sampler"),
              ("`use_distributed_sampler=`", "改用 `use_distributed_sampler=`", "replace_sampler_ddp=False", "use_distributed_sampler=False"), "safe"),
    _argument("FLB1114", "checkpoint_callback", "1.9", rename("checkpoint_callback", "enable_checkpointing"),
              ("`enable_checkpointing=`", "改用 `enable_checkpointing=`", "checkpoint_callback=False", "enable_checkpointing=False"), "safe"),
    _argument("FLB1115", "progress_bar_refresh_rate", "1.9", _switch("progress_bar_refresh_rate", "enable_progress_bar", 0),
              ("`enable_progress_bar=`, or the callback TQDMProgressBar", "改用 `enable_progress_bar=` 或回调 TQDMProgressBar", "progress_bar_refresh_rate=0", "enable_progress_bar=False"), "safe"),
    _argument("FLB1116", "weights_summary", "1.9", _switch("weights_summary", "enable_model_summary", None),
              ("`enable_model_summary=`", "改用 `enable_model_summary=`", "weights_summary=None", "enable_model_summary=False"), "safe"),
    _dropped("FLB1117", "resume_from_checkpoint", "2.0", "`trainer.fit(..., ckpt_path=)`", "改用 `trainer.fit(..., ckpt_path=)`"),
    _dropped("FLB1118", "auto_lr_find", "2.0", "`Tuner(trainer).lr_find(model)`", "改用 `Tuner(trainer).lr_find(model)`", "True"),
    _dropped("FLB1119", "auto_scale_batch_size", "2.0", "`Tuner(trainer).scale_batch_size(model)`", "改用 `Tuner(trainer).scale_batch_size(model)`", "True"),
    _dropped("FLB1120", "auto_select_gpus", "2.0", "`devices='auto'`, or find_usable_cuda_devices", "改用 `devices='auto'` 或 find_usable_cuda_devices", "True"),
    _dropped("FLB1121", "amp_backend", "2.0", "`precision='16-mixed'` is torch's", "`precision='16-mixed'` 即 torch 自带的", "'native'"),
    _dropped("FLB1122", "amp_level", "2.0", "it was apex's, which is gone", "它属于已移除的 apex", "'O2'"),
    _dropped("FLB1123", "ipus", "2.0", "no such devices are left", "不再支持这种设备", "1"),
    _dropped("FLB1124", "move_metrics_to_cpu", "2.0", "metrics stay where they are", "指标留在原处", "True"),
    _dropped("FLB1125", "multiple_trainloader_mode", "2.0", "`CombinedLoader(mode=)`", "改用 `CombinedLoader(mode=)`", "'min_size'"),
    _dropped("FLB1126", "track_grad_norm", "2.0", "log grad_norm(self, 2) in on_before_optimizer_step", "在 on_before_optimizer_step 中记录 grad_norm(self, 2)", "2"),
    _dropped("FLB1127", "flush_logs_every_n_steps", "1.9", "an argument of the logger", "改为日志器的参数", "100"),
    _dropped("FLB1128", "log_gpu_memory", "1.9", "the callback DeviceStatsMonitor", "改用回调 DeviceStatsMonitor", "True"),
    _dropped("FLB1129", "prepare_data_per_node", "1.9", "an attribute of the data module", "改为数据模块的属性", "True"),
    _dropped("FLB1130", "process_position", "1.9", "an argument of TQDMProgressBar", "改为 TQDMProgressBar 的参数", "1"),
    _dropped("FLB1131", "reload_dataloaders_every_epoch", "1.9", "`reload_dataloaders_every_n_epochs=1`", "改用 `reload_dataloaders_every_n_epochs=1`", "True"),
    _dropped("FLB1132", "stochastic_weight_avg", "1.9", "the callback StochasticWeightAveraging", "改用回调 StochasticWeightAveraging", "True"),
    _dropped("FLB1133", "terminate_on_nan", "1.9", "`detect_anomaly=` finds the operation", "`detect_anomaly=` 会找出那个运算", "True"),
    _dropped("FLB1134", "weights_save_path", "1.9", "`dirpath=` of ModelCheckpoint", "改用 ModelCheckpoint 的 `dirpath=`", "'x'"),
    row("FLB1135", "trainer accelerator ddp", _TRAINERS, _strategy,
        ("a way to train on several devices is a `strategy=` since Lightning 1.5, and no `accelerator=` any more",
         "多设备训练的方式自 Lightning 1.5 起写作 `strategy=`，不再是 `accelerator=`"),
        (f"{_HEAD}accelerator='ddp')\n", f"{_HEAD}strategy='ddp')\n"),
        library="lightning", deprecated="1.5", removed="1.9", fix="safe", runs="ValueError"),
    *[
        _method(code, name, use, raises=raises)
        for code, name, use, raises in (
            ("FLB1140", "training_epoch_end", "on_train_epoch_end", True),
            ("FLB1141", "validation_epoch_end", "on_validation_epoch_end", True),
            ("FLB1142", "test_epoch_end", "on_test_epoch_end", True),
            ("FLB1143", "training_step_end", "training_step", False),
            ("FLB1144", "validation_step_end", "validation_step", False),
            ("FLB1145", "test_step_end", "test_step", False),
            ("FLB1146", "on_epoch_start", "on_train_epoch_start", False),
            ("FLB1147", "on_epoch_end", "on_train_epoch_end", False),
            ("FLB1148", "on_batch_start", "on_train_batch_start", False),
            ("FLB1149", "on_batch_end", "on_train_batch_end", False),
            ("FLB1150", "on_pretrain_routine_start", "on_fit_start", False),
            ("FLB1151", "get_progress_bar_dict", "on_train_batch_end", False),
        )
    ],
    Rule(
        "FLB1152", "training-step-optimizer-idx",
        "`optimizer_idx` of `training_step` raises since Lightning 2.0: several optimizers need"
        " `automatic_optimization = False`",
        "`training_step` 的 `optimizer_idx` 自 Lightning 2.0 起报错：多个优化器需要 `automatic_optimization = False`",
        "from pytorch_lightning import LightningModule\n\n\nclass Net(LightningModule):\n"
        "    def training_step(self, batch, batch_idx, optimizer_idx):\n        pass\n",
        "from pytorch_lightning import LightningModule\n\n\nclass Net(LightningModule):\n"
        "    automatic_optimization = False\n\n    def training_step(self, batch, batch_idx):\n        pass\n",
        library="lightning", removed="2.0", runs="RuntimeError", whole=True, check=_optimizer_index,
    ),
    gone("FLB1160", "pytorch_lightning.callbacks.GPUStatsMonitor", "1.9", "pytorch_lightning.callbacks.DeviceStatsMonitor",
         "from pytorch_lightning.callbacks import GPUStatsMonitor\n\nout = GPUStatsMonitor()",
         "from pytorch_lightning.callbacks import DeviceStatsMonitor\n\nout = DeviceStatsMonitor()", fix="unsafe", runs="ImportError"),
    gone("FLB1161", "pytorch_lightning.callbacks.XLAStatsMonitor", "1.9", "pytorch_lightning.callbacks.DeviceStatsMonitor",
         "from pytorch_lightning.callbacks import XLAStatsMonitor\n\nout = XLAStatsMonitor()",
         "from pytorch_lightning.callbacks import DeviceStatsMonitor\n\nout = DeviceStatsMonitor()", fix="unsafe", runs="ImportError"),
    gone("FLB1162", "pytorch_lightning.plugins.DDPPlugin", "1.9", "pytorch_lightning.strategies.DDPStrategy",
         "from pytorch_lightning.plugins import DDPPlugin\n\nout = DDPPlugin()",
         "from pytorch_lightning.strategies import DDPStrategy\n\nout = DDPStrategy()", fix="safe", runs="ImportError"),
    gone("FLB1163", "pytorch_lightning.plugins.DeepSpeedPlugin", "1.9", "pytorch_lightning.strategies.DeepSpeedStrategy",
         "from pytorch_lightning.plugins import DeepSpeedPlugin\n\nout = DeepSpeedPlugin()",
         "from pytorch_lightning.strategies import DeepSpeedStrategy\n\nout = DeepSpeedStrategy()", fix="safe", runs="ImportError"),
    gone("FLB1164", "pytorch_lightning.loggers.TestTubeLogger", "1.9", "pytorch_lightning.loggers.TensorBoardLogger",
         "from pytorch_lightning.loggers import TestTubeLogger", "from pytorch_lightning.loggers import TensorBoardLogger", runs="ImportError"),
    moved("FLB1165", "pytorch_lightning.core.lightning", "1.9", "pytorch_lightning.core",
          "from pytorch_lightning.core.lightning import LightningModule", removed="1.9", fix="safe", runs="ModuleNotFoundError"),
    moved("FLB1166", "pytorch_lightning.callbacks.base", "1.9", "pytorch_lightning.callbacks",
          "from pytorch_lightning.callbacks.base import Callback", removed="1.9", fix="safe", runs="ModuleNotFoundError"),
    gone("FLB1167", "pytorch_lightning.loggers.base", "2.0", "pytorch_lightning.loggers.logger",
         "from pytorch_lightning.loggers.base import LightningLoggerBase", "from pytorch_lightning.loggers.logger import Logger", runs="ModuleNotFoundError"),
    moved("FLB1168", "pytorch_lightning.utilities.distributed", "2.0", "pytorch_lightning.utilities.rank_zero",
          "from pytorch_lightning.utilities.distributed import rank_zero_only", removed="2.0", fix="unsafe", runs="ModuleNotFoundError"),
    moved("FLB1169", "pytorch_lightning.utilities.cli", "2.0", "pytorch_lightning.cli",
          "from pytorch_lightning.utilities.cli import LightningCLI", removed="2.0", fix="safe", runs="ModuleNotFoundError"),
    moved("FLB1170", "pytorch_lightning.profiler", "2.0", "pytorch_lightning.profilers",
          "from pytorch_lightning.profiler import PyTorchProfiler", removed="2.0", fix="safe", runs="ModuleNotFoundError"),
    gone("FLB1175", "pytorch_lightning.utilities.seed.seed_everything", "2.0", "pytorch_lightning.seed_everything",
         "from pytorch_lightning.utilities.seed import seed_everything\n\nout = seed_everything(0)",
         "from pytorch_lightning import seed_everything\n\nout = seed_everything(0)", deprecated="1.8", fix="safe", runs="ImportError"),
    gone("FLB1171", "pytorch_lightning.lite", "2.0", "lightning.fabric", "from pytorch_lightning.lite import LightningLite",
         "from lightning.fabric import Fabric", runs="ModuleNotFoundError"),
    gone("FLB1172", "pytorch_lightning.metrics", "1.5", "torchmetrics", "from pytorch_lightning.metrics import Accuracy",
         "from torchmetrics import Accuracy", runs="ModuleNotFoundError"),
    gone("FLB1173", "pytorch_lightning.Trainer.from_argparse_args", "2.0", "LightningCLI",
         "import pytorch_lightning as pl\n\nout = pl.Trainer.from_argparse_args(1)", "import pytorch_lightning as pl\n\nout = pl.Trainer()",
         runs="AttributeError"),
    gone("FLB1174", "pytorch_lightning.Trainer.add_argparse_args", "2.0", "LightningCLI",
         "import pytorch_lightning as pl\n\nout = pl.Trainer.add_argparse_args(1)", "import pytorch_lightning as pl\n\nout = pl.Trainer()",
         runs="AttributeError"),
]  # fmt: skip
"""One rule per argument, hook or module."""
