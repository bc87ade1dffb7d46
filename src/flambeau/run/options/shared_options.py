"""The options that `Run` and `flambeau train` share, each declared once."""

from dataclasses import dataclass

from flambeau.run.options.option import (
    AT_LEAST_0,
    AT_LEAST_1,
    SHARE_BELOW_1,
    Range,
    option,
)


@dataclass(frozen=True)
class SharedOptions:
    """The base of `RunOptions` and of the settings of `flambeau train`."""

    extend: str | None = option(
        None,
        "continue a finished run beyond its duration by this much, such as 10ep; 0ep "
        "withdraws an extension that has not started",
        "让已完成的运行继续训练这么长，例如 10ep；0ep 撤销尚未开始的延长",
        group="length",
        may_change=True,
    )
    accumulate: int = option(
        1,
        "forward passes whose gradients are accumulated into one optimizer step",
        "每个优化器步累积梯度的前向传播次数",
        group="length",
        range=AT_LEAST_1,
    )
    parts: int | None = option(
        None,
        "compute each step as this many fixed parts, so that the resulting bits [do not depend on "
        "the number of processes](parallel.md#the-same-bits-on-any-number-of-processes)",
        "把每一步固定分成这么多部分来计算，使结果[逐位相同，与进程数无关](parallel.md#任意进程数逐位相同)",
        group="processes",
        range=AT_LEAST_1,
    )
    seed: int = option(
        0,
        "seed of sample order, augmentation, initial weights and dropout",
        "样本顺序、数据增强、初始权重和 dropout 的随机种子",
        group="machine",
        range=Range(0, 2**64, below_high=True),
    )
    retry_workers: int = option(
        0,
        "how often to restart data workers that crash or hang before the run stops with an error",
        "数据加载进程崩溃或卡住时最多重启几次，超过则报错停止",
        group="data",
        range=Range(0, 1000),
        may_change=True,
    )
    compression: str = option(
        "none",
        "compression of the gradients that processes exchange",
        "进程之间交换的梯度的压缩方式",
        group="processes",
        choices=("none", "fp16", "bf16", "powersgd"),
    )
    clip_norm: float = option(
        0.0,
        "clip the norm of all gradients together to this value; 0 is off",
        "把所有梯度合在一起的范数裁剪到此值；0 表示关闭",
        group="optimization",
        range=AT_LEAST_0,
    )
    ema: float = option(
        0.0,
        "decay of an exponential moving average of the weights, such as 0.999, which is "
        "evaluated and published instead of the weights; 0 is off",
        "权重指数滑动平均的衰减系数，例如 0.999，评估和发布时用平均后的权重；0 表示关闭",
        group="model",
        range=SHARE_BELOW_1,
    )
    checkpoint_every: str = option(
        "1ep",
        "interval between checkpoints, such as 1ep or 500st",
        "检查点的间隔，例如 1ep 或 500st",
        group="run folder",
        may_change=True,
    )
    keep: int = option(
        2,
        "number of latest checkpoints to keep, in addition to the best one",
        "除最好的检查点之外，保留多少个最新的检查点",
        group="run folder",
        range=AT_LEAST_1,
        may_change=True,
    )
    log_every: int = option(
        50,
        "optimizer steps per line of metrics.jsonl",
        "metrics.jsonl 每多少个优化器步写一行",
        group="run folder",
        range=AT_LEAST_1,
    )
    on_nan: str = option(
        "stop",
        "what to do when a loss or gradient is NaN or infinite: stop, or roll back to the "
        "last checkpoint and halve the learning rate",
        "损失或梯度为 NaN 或无穷大时的处理：stop 停止，rollback 回到上一个检查点并把学习率减半",
        group="optimization",
        choices=("stop", "rollback"),
        may_change=True,
    )
    stop_within: str | None = option(
        None,
        "seconds between SIGTERM and the kill, such as 30s: the run then writes a "
        "checkpoint only if that usually takes less time",
        "从 SIGTERM 到进程被杀的秒数，例如 30s：只有通常能在此时间内写完检查点才会写",
        group="run folder",
        may_change=True,
    )
    mirror: str | None = option(
        None,
        "address such as s3://bucket/runs/a that [keeps a copy of the run](stores.md#a-run-in-a-store), from "
        "which another machine goes on",
        "一个地址，例如 s3://bucket/runs/a，[保存运行的副本](stores.md#存储中的运行)，另一台机器可由此继续",
        group="run folder",
        may_change=True,
    )
    verify_steps: str = option(
        "0",
        "compute a share of the steps twice, such as 1/100, of several processes once by another one, and "
        "compare the bits before the optimizer acts, to find a "
        "[machine that computes wrong](reliability.md#a-machine-that-computes-wrong); 0 is off",
        "把一部分训练步（例如 1/100）计算两次，多个进程时其中一次由另一个进程计算，"
        "在优化器更新之前逐位比较，以发现"
        "[计算出错的机器](reliability.md#计算出错的机器静默数据损坏)；0 表示关闭",
        group="machine",
        may_change=True,
    )
    stall_timeout: float = option(
        60.0,
        "seconds without progress after which a hanging process or data worker is "
        "reported and the job ends; 0 is off",
        "多少秒没有进展就报告卡住的进程或数据加载进程，并结束任务；0 表示关闭",
        group="processes",
        range=AT_LEAST_0,
        may_change=True,
    )
