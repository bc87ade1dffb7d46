"""The help of `flambeau train` in Chinese: for `--zh`, and for the table of docs/zh/train.md.

A test sees that each setting and each heading has its text here.
Percent signs are doubled, as argparse wants.
"""

SETTINGS: dict[str, tuple[str, str]] = {
    "data": (
        "每类一个子文件夹的文件夹（或 train/ 和 val/）、打包的图像、torchvision:NAME、"
        "hf:NAME，或 FILE.py:FUNCTION",
        "内置的 Fashion-MNIST",
    ),
    "image_size": ("正方形图像的边长", "由图像决定，最大 224"),
    "eval_size": ("评估和预测时的边长，与训练不同时给出", ""),
    "crop": ("缩放裁剪所用的滤波器，评估时也用它", ""),
    "download": ("下载 torchvision:NAME 或 hf:NAME 缺少的部分", ""),
    "skip_bad_images": ("允许替换多少张无法读取的图像，而不是停止", ""),
    "flip": ("左右翻转一半的训练图像；不适用于数字或文字", ""),
    "crop_scale": ("训练裁剪至少保留的面积比例", "0.25"),
    "padding": ("尺寸相同的小图像在每个方向上最多移动的像素数", "边长的八分之一；内置数据为 0"),
    "augment": ("裁剪和翻转之后对训练图像做的随机操作", ""),
    "color_jitter": ("亮度、对比度和饱和度最多改变这个倍数，例如 0.4；0 表示关闭", ""),
    "random_erasing": ("训练图像中一个矩形被擦除的概率；0 表示关闭", ""),
    "balance": ("让一个 epoch 里各类均匀出现（full）或走一半（sqrt），图像会重复", ""),
    "workers": (
        "每个训练进程用多少进程读取数据；0 在训练进程中读取",
        "小图像或 CPU 为 0，否则为核数，最多 8",
    ),
    "retry_workers": ("数据工作进程死掉或停住时，在结束运行之前最多重新启动多少次", ""),
    "model": (
        "timm 的名字、torchvision:NAME、small_convnet、tiny_convnet 或 FILE.py:FUNCTION",
        "不超过 64 像素为 small_convnet（内置数据为 tiny_convnet），否则为 resnet18",
    ),
    "pretrained": ("从公开的权重开始", ""),
    "weights": ("从这个文件或运行的权重开始，能对上多少就用多少", ""),
    "drop_path": ("随机深度的概率，用于带有随机深度的模型；0 表示关闭", ""),
    "recompute": ("不保留激活的模块，如 layer*.* 或 blocks.*：内存更少，时间更多", ""),
    "compile": ("让 torch.compile 以此模式为模型生成内核", ""),
    "ema": ("权重平均的衰减，例如 0.999；0 表示不平均", ""),
    "freeze": ("不训练的部分，连同其统计量：backbone，或名字如 stem,layer1,*.bn*", ""),
    "head_lr": ("最后一层的峰值学习率，与其他层不同时给出", ""),
    "layer_decay": ("每往前一层学习率再乘的系数，如 0.75", ""),
    "teacher": ("一个运行的目录，在标签之外学习其模型的概率", ""),
    "teacher_weight": ("教师在损失中的份额，最大为 1", "0.5"),
    "temperature": ("使教师和学生的概率变平缓的温度", "4"),
    "qat": (
        "量化感知训练：从 --weights 或 --pretrained 的权重开始，训练时取整到 8 位，供 "
        "flambeau export --format onnx 使用",
        "",
    ),
    "epochs": ("--duration Nep 的简写", ""),
    "duration": (
        "例如 90ep 或 5000st",
        "内置数据 5ep，否则 30ep，带 --pretrained 或 --weights 时 10ep",
    ),
    "extend": ("让完成的运行在其长度之外再训练这么久，例如 10ep；0ep 撤回尚未训练的延长", ""),
    "batch_size": (
        "一次前向传播的样本数，所有进程合计；auto 试出内存放得下多少，其余用梯度累积补足一步，"
        "auto:512 表示一步 512 个",
        "小图像 128，其他图像和内置数据 64，图像少时更小",
    ),
    "early_stop": ("连续这么多个 epoch 的 val_accuracy 都没有变得更好时，结束运行；0 表示从不", ""),
    "accumulate": ("优化器一步所含的前向传播次数", ""),
    "optimizer": ("sgd 带 Nesterov 动量；muon 负责内层的权重矩阵，其余由 adamw 负责", ""),
    "momentum": ("用于 sgd、rmsprop 和 muon；从 0 到小于 1", "sgd 和 rmsprop 为 0.9，muon 为 0.95"),
    "betas": (
        "adam、adamw、nadam、radam、adamax 的两个系数，例如 0.9,0.98：梯度及其平方的滑动平均",
        "0.9,0.999",
    ),
    "lr": (
        "学习率的峰值",
        "随批次增大；256 时 sgd 为 0.1（small_convnet 为 0.4，tiny_convnet 为 1.6），adamw 为 0.001；"
        "预训练时为十分之一，qat 时为百分之一",
    ),
    "weight_decay": ("作用于二维及以上的权重，从不作用于偏置和归一化层", ""),
    "schedule": ("学习率调度", ""),
    "milestones": ("用于 multistep：学习率在何时下降，例如 30ep,60ep 或 50%%,75%%", "50%%,75%%"),
    "gamma": (
        "用于 multistep 和 exponential：在每个里程碑处或每个 epoch 乘以的系数",
        "multistep 0.1，exponential 0.9",
    ),
    "warmup": ("例如 5%%、2ep 或 500st", ""),
    "patience": ("用于 plateau：验证准确率多少个 epoch 没有变好之后才降低学习率", "3"),
    "plateau_factor": ("用于 plateau：学习率所乘的数", "0.1"),
    "clip_norm": ("把梯度的范数裁剪到此值；0 表示不裁剪", ""),
    "label_smoothing": ("从 0 到小于 1", ""),
    "class_weights": (
        "每个类别在损失中的权重：auto 取它在图像中所占份额的倒数；或一个 JSON 文件，每个类别一个数",
        "",
    ),
    "mixup": ("mixup 的 alpha；0 表示关闭", ""),
    "cutmix": ("CutMix 的 alpha；0 表示关闭；与 --mixup 同用时每批取其中之一", ""),
    "on_nan": ("损失或梯度不是有限值时怎么办；rollback 回到检查点，以减半的学习率继续", ""),
    "precision": ("前向传播的精度；auto 在硬件原生支持时取 bf16", ""),
    "device": ("例如 cpu、cuda 或 cuda:1", ""),
    "seed": ("一切随机性的种子", ""),
    "parts": ("把每一步切成这么多部分，逐个计算，使任意进程数逐位相同", ""),
    "sync_bn": ("在所有进程或部分的批次上归一化，而不是各自的那一份", ""),
    "shard": ("权重如何分布在进程上：每个进程持有全部，或各持有一部分", ""),
    "compression": ("进程之间交换的梯度如何压缩", ""),
    "stop_within": ("收到 SIGTERM 之后，只有写检查点所需的时间少于此值（例如 30s）才写", ""),
    "stall_timeout": ("进程或数据工作进程多少秒没有进展就指出它并结束任务；0 表示永不", ""),
    "checkpoint_every": ("例如 1ep 或 500st", ""),
    "keep": ("除最好的之外，保留多少个最新的检查点", ""),
    "log_every": ("metrics.jsonl 每多少步一行", ""),
    "track": (
        "同时接收 metrics.jsonl 各行的跟踪器，一个或用逗号分隔的几个：tensorboard、"
        "tensorboard:histograms、tensorboard:graph、wandb、mlflow、csv",
        "",
    ),
}
"""By the name of the setting: what it means, and what is chosen where it is left open ('' as in English)."""

FLAGS = {
    "out": "运行目录（默认：runs/NAME，给出了设置时后面再加一个哈希）",
    "config": "从 TOML 文件读取设置；命令行优先于文件",
    "fresh": "重新开始；原有的运行改名，不会删除",
    "dry_run": "训练几步，给出它们的开销和整个运行的时间，什么都不留下",
    "find_lr": "用逐步升高的学习率训练至多 100 步，画出各步的损失，指出最合适的学习率，此外什么都不留下",
    "trust": "运行目录（或教师模型的目录）中指名、而本命令没有指名的代码（FILE.py:FUNCTION）也执行，"
    "即使没有记录表明该目录是你在本机创建的；请先读一遍那些代码",
    "replay_step": "重新执行使运行停止的那一步；什么都不写入",
    "json_lines": "在标准输出上把发生的事逐行打印为 JSON 对象，除此之外什么都不打印",
    "procs": "在本机的 N 个进程上训练；auto 表示每个 GPU 一个（默认：1）",
}
"""What belongs to the command and not to a run."""

HEADINGS = {
    "main": "最常用的设置",
    "data": "数据",
    "model": "模型",
    "fine-tuning": "微调",
    "length": "长度",
    "optimization": "优化",
    "machine": "机器",
    "processes": "多个进程",
    "run folder": "运行目录",
}
DESCRIPTION = "训练图像分类模型；再次执行同一命令会继续它的运行"
OPTIONS = "选项"
HELP = "显示帮助"
IN_CHINESE = "显示这份中文帮助"
DEFAULT = "默认："
YES = "是"
