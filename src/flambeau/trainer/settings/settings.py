"""The settings of `flambeau train`; its flags are made from them and the options shared with `Run`.

Torch is not imported here, so that `--help` answers at once.
"""

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from flambeau.data.sources.fold_name import parse_fold, parse_test
from flambeau.data.sources.target_names import TASKS
from flambeau.data.stores.address import mirror_address
from flambeau.data.stores.block_cache import parse_bytes
from flambeau.errors import InputError
from flambeau.run.options.advice import Advice
from flambeau.run.options.durations import parse_duration, parse_seconds, parse_share
from flambeau.run.options.named_schedule import NamedSchedule
from flambeau.run.options.option import (
    ABOVE_0,
    AT_LEAST_0,
    AT_LEAST_1,
    SHARE,
    SHARE_ABOVE_0,
    SHARE_BELOW_1,
    Range,
    check_value,
    option,
    options_of,
    typed,
)
from flambeau.run.options.portable_bits import OPTIMIZERS
from flambeau.run.options.shared_options import SharedOptions
from flambeau.run.options.tracker_names import tracker_list

PRESETS = ("speedrun", "speedrun95")
"""Files of settings in the folder `presets`, by name."""
BETAS = ("adam", "adamw", "nadam", "radam", "adamax")
"""Optimizers with betas."""
BY_TASK = ("sgd", "adamw")
"""The optimizers of which a task has one as its default."""
MOMENTUM = {"sgd": 0.9, "rmsprop": 0.9, "muon": 0.95}
"""Default momentum of the optimizers that have one."""
BEST = (
    "val_accuracy",
    "val_loss",
    "val_macro_f1",
    "val_macro_recall",
    "val_map",
    "val_micro_f1",
    "val_hamming_loss",
    "val_mae",
    "val_rmse",
    "val_r2",
    "val_spearman",
    "val_miou",
    "val_dice",
    "val_pixel_accuracy",
    "val_boundary_f1",
)
"""Figures of an evaluation that can choose the best weights; each task has some of them."""
BY_FLAGS = Advice(
    start_again="--fresh sets it aside, and --weights RUN --out NEW begins another one from its weights",
    train_longer="--extend 10ep trains a finished run on for so much more",
    save_memory="Use a smaller --image-size or --model, --precision bf16, or --recompute 'layer*.*'",
    stay_finite="Usual cures: a smaller --lr, --clip-norm 1, --on-nan rollback",
)
"""Advice in the messages of `flambeau train`."""
_REQUIRES = (  # a setting, and the values of another one with which it has an effect
    ("patience", "schedule", ("plateau",)),
    ("plateau_factor", "schedule", ("plateau",)),
    ("momentum", "optimizer", MOMENTUM),
    ("fixed_norm", "optimizer", ("muon",)),
    ("muon_others", "optimizer", ("muon",)),
    ("muon_others_lr", "optimizer", ("muon",)),
    ("betas", "optimizer", BETAS),
)
_ALPHA = Range(1e-6, 1e6, or_zero=True)  # outside, Beta(alpha, alpha) cannot be sampled


@dataclass(frozen=True)
class Settings(SharedOptions):
    """Every setting of a training, as given. None: chosen from the data."""

    data: str | None = option(
        None,
        "the images: a folder with one sub-folder per class (or train/ and val/), or images/ and masks/, a "
        "packed file, torchvision:NAME, hf:NAME, an address of shards (s3://...), or FILE.py:FUNCTION",
        "图像数据：每类一个子目录的文件夹（或 train/ 和 val/）、images/ 加 masks/、打包文件、"
        "torchvision:NAME、hf:NAME、分片的地址（s3://...）或 FILE.py:FUNCTION",
        group="data",
        auto=("the embedded Fashion-MNIST", "内置的 Fashion-MNIST"),
        may_change=True,
    )
    task: str | None = option(
        None,
        "what is learned of each image: its class, several labels, numbers, or the class of each pixel",
        "从每张图像学习什么：它的类别、多个标签、数值，或每个像素的类别",
        group="data",
        choices=TASKS,
        auto=("found from the data", "由数据判断"),
    )
    target: str | None = option(
        None,
        "columns of the table that hold what is learned, separated by commas, such as age,weight",
        "表格中存放学习目标的列，用逗号分隔，例如 age,weight",
        group="data",
        auto=("a column called label, or like it", "名为 label 或类似的列"),
    )
    label_separator: str | None = option(
        None,
        "what separates the labels in a cell of a table, such as a comma",
        "表格单元格中分隔多个标签的符号，例如逗号",
        group="data",
        auto=("found from the cells", "由单元格判断"),
    )
    group: str | None = option(
        None,
        "column of the table that says which images stay on one side of the hold-out, such as those of a "
        "patient",
        "表格中的分组列：同组的图像（例如同一病人的）在留出时不会分到两边",
        group="data",
    )
    split: str | None = option(
        None,
        "column of the table that says train, val or test",
        "表格中写明 train、val 或 test 的列",
        group="data",
        auto=("a column called split, or like it", "名为 split 或类似的列"),
    )
    fold: str | None = option(
        None,
        "which fold of a cross-validation is held out, such as 2/5; the others are trained on "
        "([flambeau sweep](sweep.md#seeds-and-folds) trains all)",
        "交叉验证中留出哪一折，例如 2/5；其余各折用于训练"
        "（[flambeau sweep](sweep.md#多个种子与交叉验证) 训练全部各折）",
        group="data",
    )
    subset: float | None = option(
        None,
        "share of the training images that is trained on, of each class; smaller shares lie in larger ones",
        "参与训练的训练图像的比例，按类别分别选取；较小的比例包含在较大的比例之中",
        group="data",
        auto=("all", "全部"),
        range=SHARE_ABOVE_0,
    )
    test: str | None = option(
        None,
        "images that are neither trained nor validated on, kept for [one test at the end]"
        "(sweep.md#a-test-part-that-the-search-never-sees): a share of each class such as 10%, or other data",
        "既不用于训练也不用于验证、留作[最后一次测试](sweep.md#搜索从不接触的测试部分)的图像："
        "每类的一个比例，例如 10%，或另外的数据",
        group="data",
    )
    ignore_index: int | None = option(
        None,
        "the number in masks of pixels that count in no loss and no figure",
        "掩码中不计入损失和任何指标的像素所用的数字",
        group="data",
        auto=("255, unless it has a name", "255，除非它有名称"),
        range=Range(0, 255),
    )
    preset: str | None = option(
        None,
        "settings that belong together, [by name](#presets); flags given beside it take precedence",
        "[按名称](#预设)给出的一组配套设置；同时给出的命令行选项优先",
        group="run folder",
        choices=PRESETS,
    )
    channels: int | None = option(
        None,
        "channels of the images: 1 makes grey and 3 color of any image, another number keeps all that the "
        "images have, or makes them of the pages of a TIFF",
        "图像的通道数：1 表示转为灰度，3 表示转为彩色，其他数值保留图像的全部通道，或由 TIFF 的各页组成",
        group="data",
        auto=(
            "1 or 3 by the images and the model; all of them, where they are no color",
            "由图像和模型决定为 1 或 3；如果通道不是颜色，则保留全部",
        ),
        range=Range(1, 1024),  # MAX_CHANNELS of the images
    )
    bits: int | None = option(
        None,
        "bits per level of the images, 8 or 16: 16 refuses images of 8, and 8 scales those of 16",
        "图像每个像素值的位数，8 或 16：16 拒绝 8 位图像，8 会把 16 位图像换算为 8 位",
        group="data",
        auto=(
            "16 if all images looked at have them, else 8",
            "查看的图像全为 16 位时为 16，否则为 8",
        ),
    )
    image_size: int | None = option(
        None,
        "side of the square training images, in pixels",
        "训练图像（正方形）的边长，单位为像素",
        group="data",
        auto=("from the images, at most 224", "由图像决定，最大 224"),
        range=Range(8, 2**14),
    )
    eval_size: int | None = option(
        None,
        "side of the images in evaluation and prediction, if it differs from --image-size",
        "评估和预测时的图像边长，与 --image-size 不同时设置",
        group="data",
        range=Range(8, 2**14),
    )
    start_size: int | None = option(
        None,
        "side of the training images in the first 30 % of the steps, pixels; it grows to --image-size, which "
        "the last 30 % have (progressive resizing)",
        "前 30 % 的步中训练图像的边长，单位为像素；之后逐渐增大，最后 30 % 的步用 --image-size（渐进式放大）",
        group="data",
        range=Range(8, 2**14),
    )
    crop: str = option(
        "bilinear",
        "interpolation used when crops are resized, in training and evaluation",
        "缩放裁剪区域所用的插值方法，训练和评估都用它",
        group="data",
        choices=("bilinear", "bicubic"),
    )
    download: bool = option(
        False,
        "download whatever is missing of torchvision:NAME or hf:NAME",
        "下载 torchvision:NAME 或 hf:NAME 中缺少的文件",
        group="data",
        may_change=True,
    )
    cache: str | None = option(
        None,
        "folder of the local disk for what is fetched from a store",
        "从存储取来的数据在本地磁盘上的文件夹",
        group="data",
        auto=(
            "`$FLAMBEAU_CACHE`, else `~/.cache/flambeau/store`",
            "`$FLAMBEAU_CACHE`，否则 `~/.cache/flambeau/store`",
        ),
        may_change=True,
    )
    cache_size: str | None = option(
        None,
        "most that is kept of it, such as 200GB; what was not used for longest is removed first",
        "其中最多保留多少，例如 200GB；最久未用的最先删除",
        group="data",
        auto=("50GB", "50GB"),
        may_change=True,
    )
    skip_bad_images: int = option(
        0,
        "number of unreadable images to replace by others before the run stops with an error",
        "最多用其他图像替换多少张无法读取的图像，超过则报错停止",
        group="data",
        range=AT_LEAST_0,
        may_change=True,
    )
    flip: bool | None = option(
        None,
        "mirror half of the training images at random; turn it off for digits and text",
        "随机水平翻转一半的训练图像；数字和文字应关闭",
        group="data",
        auto=("yes; numbers no", "是；数值任务为否"),
    )
    alternate_flip: bool = option(
        False,
        "mirror every training image in every other epoch, so that any two epochs show both sides of it, in "
        "place of half of them at random",
        "每隔一个 epoch 翻转每张训练图像，使相邻两个 epoch 各看到一面，代替随机翻转一半",
        group="data",
    )
    crop_scale: float | None = option(
        None,
        "smallest share of the image area that a random training crop keeps",
        "随机训练裁剪至少保留的面积比例",
        group="data",
        auto=(
            "0.25; masks 0.9; labels, numbers 1, whole images",
            "0.25；掩码任务为 0.9；多标签和数值任务为 1，即整张图像",
        ),
        range=SHARE_ABOVE_0,
    )
    padding: int | None = option(
        None,
        "largest random shift of a training image in pixels, for data sets whose images "
        "all have one small size",
        "训练图像随机平移的最大像素数，用于所有图像都是同一小尺寸的数据集",
        group="data",
        auto=(
            "an eighth of their side; 0 for numbers and for the embedded data",
            "边长的八分之一；数值任务和内置数据为 0",
        ),
        range=Range(0, 63),
    )
    augment: str = option(
        "none",
        "random operations on training images, applied after crop and flip",
        "对训练图像做的随机增强，在裁剪和翻转之后进行",
        group="data",
        choices=("none", "randaugment", "trivialaugment"),
    )
    color_jitter: float = option(
        0.0,
        "change brightness, contrast and saturation at random by up to this factor, such "
        "as 0.4; 0 is off",
        "随机改变亮度、对比度和饱和度的最大幅度，例如 0.4；0 表示关闭",
        group="data",
        range=SHARE,
    )
    random_erasing: float = option(
        0.0,
        "probability that a rectangle of a training image is erased; 0 is off",
        "随机擦除训练图像中一个矩形的概率；0 表示关闭",
        group="data",
        range=SHARE,
    )
    shuffle_window: int | None = option(
        None,
        "mix images of [neighbouring blocks](stores.md#order) only, over so many of them, instead of all; 0 "
        "is all",
        "只在[相邻的块](stores.md#顺序)之间混合图像，范围是这么多张，而不是全部；0 表示全部",
        group="data",
        range=AT_LEAST_0,
        auto=(
            "16384 for more than 32768 images in a store, else all",
            "存储中的图像超过 32768 张时为 16384，其余为全部",
        ),
    )
    balance: str = option(
        "none",
        "draw rare classes more often: full gives every class the same share of an epoch, "
        "sqrt goes half of the way; images are repeated",
        "更频繁地抽取样本少的类别：full 使各类在一个 epoch 中所占份额相同，sqrt 介于两者之间；图像会重复",
        group="data",
        choices=("none", "sqrt", "full"),
    )
    workers: int | None = option(
        None,
        "processes that load data, per training process; 0 loads in the training process itself",
        "每个训练进程用来加载数据的进程数；0 表示在训练进程中加载",
        group="data",
        auto=(
            "0 for small images or on a CPU, else the cores, at most 8",
            "小图像或 CPU 为 0，否则为核数，最多 8",
        ),
        range=Range(0, 1024),
        may_change=True,
    )
    model: str | None = option(
        None,
        "a timm name, torchvision:NAME, small_convnet, tiny_convnet, speedrun_convnet, or FILE.py:FUNCTION",
        "timm 模型名、torchvision:NAME、small_convnet、tiny_convnet、speedrun_convnet 或 FILE.py:FUNCTION",
        group="model",
        auto=(
            "small_convnet up to 64 pixels (tiny_convnet for the embedded data), else resnet18",
            "不超过 64 像素为 small_convnet（内置数据为 tiny_convnet），否则为 resnet18",
        ),
    )
    pretrained: bool = option(
        False,
        "start from the published pretrained weights of the model",
        "从公开的预训练权重开始训练",
        group="model",
    )
    weights: str | None = option(
        None,
        "start from the weights in this file or run; tensors whose names and shapes match "
        "are loaded",
        "从此文件或运行的权重开始训练；名称和形状一致的张量会被加载",
        group="model",
    )
    drop_path: float = option(
        0.0,
        "probability of stochastic depth, for models that have it; 0 is off",
        "随机深度（stochastic depth）的概率，用于支持它的模型；0 表示关闭",
        group="model",
        range=SHARE_BELOW_1,
    )
    recompute: str = option(
        "none",
        "modules whose activations are recomputed in the backward pass, such as layer*.* "
        "or blocks.*: less memory, more time",
        "在反向传播中重新计算激活值的模块，例如 layer*.* 或 blocks.*：省内存，但更慢",
        group="model",
        may_change=True,
    )
    compile: str = option(
        "none",
        "compile the model with torch.compile, in this mode",
        "用 torch.compile 以此模式编译模型",
        group="model",
        choices=("none", "default", "reduce-overhead", "max-autotune"),
        bare="default",
        may_change=True,
    )
    freeze: str = option(
        "none",
        "parts to freeze, including their BatchNorm statistics: backbone, or names such "
        "as stem,layer1,*.bn*",
        "要冻结的部分，包括其 BatchNorm 统计量：backbone，或名称如 stem,layer1,*.bn*",
        group="fine-tuning",
    )
    head_lr: float | None = option(
        None,
        "peak learning rate of the last layer, if it differs from --lr",
        "最后一层的峰值学习率，与 --lr 不同时设置",
        group="fine-tuning",
        range=ABOVE_0,
    )
    layer_decay: float = option(
        1.0,
        "factor by which the learning rate falls from each layer to the one before it, "
        "such as 0.75",
        "从每一层到前一层学习率的衰减系数，例如 0.75",
        group="fine-tuning",
        range=SHARE_ABOVE_0,
    )
    teacher: str | None = option(
        None,
        "run folder of a teacher model for knowledge distillation: its probabilities are "
        "learned together with the labels; of several, such as runs/a,runs/b, their mean",
        "知识蒸馏中教师模型的运行目录：在学习标签的同时学习它输出的概率；"
        "多个（例如 runs/a,runs/b）则学习其平均",
        group="fine-tuning",
    )
    teacher_weight: float | None = option(
        None,
        "weight of the teacher's probabilities in the loss, up to 1; the labels have the rest",
        "教师的概率在损失中的权重，最大为 1；其余归标签",
        group="fine-tuning",
        auto=("0.5", "0.5"),
        range=SHARE_ABOVE_0,
    )
    temperature: float | None = option(
        None,
        "softmax temperature of teacher and student in distillation",
        "蒸馏中教师和学生的 softmax 温度",
        group="fine-tuning",
        auto=("4", "4"),
        range=ABOVE_0,
    )
    qat: bool = option(
        False,
        "quantization-aware training: simulate 8-bit rounding from the weights of "
        "--weights or --pretrained on, for flambeau export --format onnx",
        "量化感知训练：从 --weights 或 --pretrained 的权重开始模拟 8 位取整，供 flambeau export --format "
        "onnx 使用",
        group="fine-tuning",
    )
    epochs: int | None = option(
        None,
        "length of the training in epochs; short for --duration Nep",
        "训练的 epoch 数；--duration Nep 的简写",
        group="length",
        range=AT_LEAST_1,
    )
    duration: str | None = option(
        None,
        "length of the training, such as 90ep (epochs) or 5000st (steps)",
        "训练长度，例如 90ep（epoch）或 5000st（步）",
        group="length",
        auto=(
            "4ep for the embedded data, 30ep, or 10ep with --pretrained or --weights",
            "内置数据 4ep，否则 30ep，带 --pretrained 或 --weights 时 10ep",
        ),
    )
    batch_size: int | str | None = option(
        None,
        "images per forward pass, over all processes; auto finds the largest that fits into "
        "memory and accumulates gradients up to the usual batch, auto:512 up to a batch of 512",
        "每次前向传播的图像数，所有进程合计；auto 找出内存放得下的最大值，并用梯度累积补足通常的批大小，"
        "auto:512 则补足到 512",
        group="length",
        auto=(
            "128 for small images, 64 for others and the embedded data, less for few",
            "小图像 128，其他图像和内置数据 64，图像少时更小",
        ),
        range=AT_LEAST_1,
    )
    early_stop: int = option(
        0,
        "stop after this many epochs without a better value of --best; 0 is off",
        "连续这么多个 epoch 的 --best 指标没有改善就停止；0 表示关闭",
        group="length",
        range=AT_LEAST_0,
    )
    best: str | None = option(
        None,
        "figure of an evaluation that chooses the best weights; of uneven classes val_macro_f1, or "
        "val_macro_recall, the balanced accuracy",
        "用验证集的哪个指标选出最佳权重；类别不均衡时用 val_macro_f1 或 val_macro_recall（平衡准确率）",
        group="length",
        choices=BEST,
        auto=(
            "classes val_accuracy, several labels val_map, numbers val_loss, masks val_miou",
            "类别为 val_accuracy，多标签为 val_map，数值为 val_loss，掩码为 val_miou",
        ),
    )
    optimizer: str | None = option(
        None,
        "sgd uses Nesterov momentum; muon updates the inner weight matrices and adamw "
        "everything else",
        "sgd 使用 Nesterov 动量；muon 更新内层的权重矩阵，其余由 adamw 更新",
        group="optimization",
        choices=("sgd", "adam", "adamw", "nadam", "radam", "adamax", "adagrad", "rmsprop", "muon"),
        auto=(
            "classes and several labels sgd, numbers and masks adamw",
            "类别和多标签为 sgd，数值和掩码为 adamw",
        ),
    )
    momentum: float | None = option(
        None,
        "momentum of sgd, rmsprop and muon",
        "sgd、rmsprop 和 muon 的动量",
        group="optimization",
        auto=("sgd and rmsprop 0.9, muon 0.95", "sgd 和 rmsprop 为 0.9，muon 为 0.95"),
        range=SHARE_BELOW_1,
    )
    betas: str | None = option(
        None,
        "the two betas of adam, adamw, nadam, radam and adamax, such as 0.9,0.98",
        "adam、adamw、nadam、radam 和 adamax 的两个 beta，例如 0.9,0.98",
        group="optimization",
        auto=("0.9,0.999", "0.9,0.999"),
    )
    fixed_norm: bool = option(
        False,
        "muon keeps the norm of each of its matrices fixed, in place of weight decay, and lr, such as 0.24, "
        "is the share of it by which a matrix moves; for models that normalize after each of them",
        "muon 把它的每个矩阵的范数保持不变，代替权重衰减，lr（例如 0.24）即矩阵每步移动的量占该范数的比例；"
        "用于每个矩阵之后都有归一化层的模型",
        group="optimization",
    )
    muon_others: str = option(
        "adamw",
        "the optimizer of what muon does not take: biases, norms, the first and the last layer; sgd has "
        "Nesterov momentum of 0.9",
        "muon 不管的参数（偏置、归一化层、第一层和最后一层）所用的优化器；sgd 使用 0.9 的 Nesterov 动量",
        group="optimization",
        choices=("adamw", "sgd"),
    )
    muon_others_lr: float | None = option(
        None,
        "peak learning rate of what muon does not take",
        "muon 不管的参数的峰值学习率",
        group="optimization",
        auto=("lr", "lr"),
        range=ABOVE_0,
    )
    lr: float | None = option(
        None,
        "peak learning rate",
        "峰值学习率",
        group="optimization",
        auto=(
            "grows with the batch; at 256: sgd 0.1 (small_convnet 0.4; resnet18 0.4 and tiny_convnet 1.6, "
            "but at most 0.8), adamw 0.001; pretrained or weights a tenth, qat a hundredth",
            "随批次增大；256 时 sgd 为 0.1（small_convnet 为 0.4；resnet18 为 0.4，tiny_convnet 为 1.6，"
            "但至多 0.8），adamw 为 0.001；预训练时为十分之一，qat 时为百分之一",
        ),
        range=ABOVE_0,
    )
    weight_decay: float = option(
        0.0005,
        "weight decay; never applied to biases and normalization layers",
        "权重衰减；不作用于偏置和归一化层",
        group="optimization",
        range=AT_LEAST_0,
    )
    schedule: str = option(
        "cosine",
        "learning-rate schedule",
        "学习率调度方式",
        group="optimization",
        choices=(
            "cosine",
            "linear",
            "multistep",
            "exponential",
            "constant",
            "polynomial",
            "wsd",
            "one-cycle",
            "cosine-restarts",
            "plateau",
        ),
    )
    milestones: str | None = option(
        None,
        "for multistep: when the learning rate falls, such as 30ep,60ep or 50%,75%",
        "用于 multistep：学习率何时下降，例如 30ep,60ep 或 50%,75%",
        group="optimization",
        auto=("50%,75%", "50%,75%"),
    )
    gamma: float | None = option(
        None,
        "for multistep and exponential: factor of the learning rate at each milestone, or "
        "per epoch",
        "用于 multistep 和 exponential：学习率在每个里程碑处或每个 epoch 乘以的系数",
        group="optimization",
        auto=("multistep 0.1, exponential 0.9", "multistep 0.1，exponential 0.9"),
        range=SHARE_ABOVE_0,
    )
    warmup: str | None = option(
        None,
        "length of the linear warm-up of the learning rate, such as 5%, 2ep or 500st",
        "学习率线性预热的长度，例如 5%、2ep 或 500st",
        group="optimization",
        auto=("10%, 25% for the embedded data", "10%，内置数据 25%"),
    )
    patience: int | None = option(
        None,
        "for plateau: epochs without a better value of --best before the learning rate falls",
        "用于 plateau：--best 指标多少个 epoch 没有改善才降低学习率",
        group="optimization",
        auto=("3", "3"),
        range=AT_LEAST_0,
    )
    plateau_factor: float | None = option(
        None,
        "for plateau: factor by which the learning rate falls",
        "用于 plateau：学习率下降时乘以的系数",
        group="optimization",
        auto=("0.1", "0.1"),
        range=Range(0, 1, above_low=True, below_high=True),
    )
    loss: str | None = option(
        None,
        "the loss: cross-entropy for classes; bce or asymmetric for several labels; mse, l1 or huber for "
        "numbers; cross-entropy, dice or their sum for masks",
        "损失函数：类别用 cross-entropy；多标签用 bce 或 asymmetric；数值用 mse、l1 或 huber；"
        "掩码用 cross-entropy、dice 或两者之和",
        group="optimization",
        choices=(
            "cross-entropy",
            "bce",
            "asymmetric",
            "mse",
            "l1",
            "huber",
            "dice",
            "cross-entropy+dice",
        ),
        auto=("the first of these for the task", "该任务的第一个"),
    )
    label_smoothing: float | None = option(
        None,
        "label smoothing",
        "标签平滑系数",
        group="optimization",
        auto=("0.1 for classes, else 0", "类别为 0.1，否则为 0"),
        range=SHARE_BELOW_1,
    )
    class_weights: str | None = option(
        None,
        "weight of each class in the loss: auto uses the inverse of its share of the "
        "images, or for several labels the images without it by those with it; or a JSON file with one "
        "number per class",
        "每个类别在损失中的权重：auto 取其图像份额的倒数，多标签时取没有该标签与有该标签的图像数之比；"
        "或一个 JSON 文件，每类一个数",
        group="optimization",
    )
    mixup: float = option(
        0.0,
        "alpha of mixup; 0 is off",
        "mixup 的 alpha；0 表示关闭",
        group="optimization",
        range=_ALPHA,
    )
    cutmix: float = option(
        0.0,
        "alpha of CutMix; 0 is off; together with --mixup each batch gets one of the two",
        "CutMix 的 alpha；0 表示关闭；与 --mixup 同用时每个批次取其中之一",
        group="optimization",
        range=_ALPHA,
    )
    precision: str = option(
        "auto",
        "numeric precision of the forward pass; auto uses bf16 where the hardware "
        "supports it natively",
        "前向传播的数值精度；auto 在硬件原生支持时使用 bf16",
        group="machine",
        choices=("auto", "fp32", "tf32", "bf16", "fp16"),
    )
    device: str = option(
        "auto",
        "device to train on, such as cpu, cuda or cuda:1",
        "训练所用的设备，例如 cpu、cuda 或 cuda:1",
        group="machine",
    )
    portable_bits: int | None = option(
        None,
        "compute with so many threads, and only by operations that give [the same bits on every x86-64 "
        "processor with AVX2](reproducibility.md#the-same-bits-on-another-processor)",
        "用这么多线程计算，并且只用在每种带 AVX2 的 x86-64 处理器上"
        "[结果逐位相同](reproducibility.md#换处理器也逐位相同)的运算",
        group="machine",
        range=Range(1, 256),
    )
    sync_bn: bool = option(
        False,
        "compute BatchNorm statistics over the batch of all processes (or parts) instead "
        "of each one's share",
        "在所有进程（或部分）的批次上计算 BatchNorm 统计量，而不是各自的那一份",
        group="processes",
    )
    shard: str = option(
        "none",
        "how weights and optimizer state are distributed: none keeps all on every "
        "process, fsdp keeps one shard on each",
        "权重和优化器状态的分布方式：none 每个进程保存全部，fsdp 每个进程只保存一个分片",
        group="processes",
        choices=("none", "fsdp"),
        may_change=True,
    )
    track: str = option(
        "none",
        "experiment trackers that also get the lines of metrics.jsonl, separated by commas: "
        "tensorboard, tensorboard:histograms, tensorboard:graph, wandb, mlflow, csv",
        "同时接收 metrics.jsonl 各行的实验跟踪器，用逗号分隔：tensorboard、"
        "tensorboard:histograms、tensorboard:graph、wandb、mlflow、csv",
        group="run folder",
        may_change=True,
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = typed(field, getattr(self, field.name))
            check_value(field, value)
            object.__setattr__(self, field.name, value)
        self._check_contradictions()
        self._check_durations()
        self._check_effects()

    def _check_contradictions(self) -> None:
        if self.epochs is not None and self.duration is not None:
            raise InputError(
                f"epochs = {self.epochs} and duration = {self.duration!r} contradict each other: "
                "give one of them"
            )
        if self.bits not in (None, 8, 16):
            raise InputError(f"bits must be 8 or 16, got {self.bits}")
        if self.fold is not None:
            parse_fold(self.fold)
        if self.test is not None:
            parse_test(self.test)
        if self.alternate_flip and self.flip is False:
            raise InputError("alternate_flip has no effect without flip: leave one of them out")
        if self.balance != "none" and self.class_weights == "auto":
            raise InputError(
                f"balance = {self.balance!r} and class_weights = 'auto' both make up for rare classes: "
                "give one of them"
            )
        if self.balance != "none" and self.shuffle_window:
            raise InputError(
                f"balance = {self.balance!r} draws from all images: leave shuffle_window out"
            )
        if self.pretrained and self.weights is not None:
            raise InputError("pretrained and weights contradict each other: give one of them")
        if self.qat and not self.pretrained and self.weights is None:
            raise InputError("qat starts from trained weights: give --weights RUN or --pretrained")
        model = self.model or ""
        has_published = not model.endswith(("_convnet", "_convnet_wide")) and ".py:" not in model
        if self.pretrained and not has_published:
            raise InputError(
                "pretrained needs a timm or torchvision model: there are no published weights of "
                f"{model}"
            )

    def _check_durations(self) -> None:
        length = self.duration and parse_duration(self.duration, name="duration")
        if length and length.amount <= 0:
            raise InputError(f"duration must be above 0, got {self.duration!r}")
        warmup = self.warmup and parse_duration(self.warmup, name="warmup", units="% ep st")
        if warmup and length and warmup.unit == length.unit and warmup.amount >= length.amount:
            raise InputError(
                f"warmup = {self.warmup!r} is not shorter than duration = {self.duration!r}"
            )
        if warmup and warmup.unit == "%" and warmup.amount >= 100:
            raise InputError(f"warmup = {self.warmup!r} leaves nothing of the run")
        if self.extend is not None:
            parse_duration(self.extend, name="extend")
        if self.cache_size is not None:
            parse_bytes(self.cache_size, name="cache_size")
        if self.stop_within is not None:
            parse_seconds(self.stop_within, name="stop_within")
        parse_share(self.verify_steps, name="verify_steps")
        if self.mirror is not None:
            mirror_address(self.mirror)
        if parse_duration(self.checkpoint_every, name="checkpoint_every").amount <= 0:
            raise InputError(f"checkpoint_every must be above 0, got {self.checkpoint_every!r}")

    def named_schedule(self) -> NamedSchedule:
        """The schedule with its numbers; refuses those that it does not take."""
        milestones = None if self.milestones is None else self.milestones.split(",")
        return NamedSchedule(self.schedule, gamma=self.gamma, milestones=milestones)

    def _check_effects(self) -> None:
        for name, other, values in _REQUIRES:
            given = getattr(self, name) != FIELDS[name].default
            value = getattr(self, other)
            if given and value is None and not set(values) & {*BY_TASK}:
                raise InputError(
                    f"{name} has an effect only with {other} = {' or '.join(map(repr, values))}: leave it out"
                )
            if given and value is not None and value not in values:
                raise InputError(f"{name} has no effect with {other} = {value!r}: leave it out")
        if self.fixed_norm and None in (self.lr, self.muon_others_lr):
            raise InputError(
                "fixed_norm needs lr, then the share of its norm by which a matrix moves, such as 0.24, and "
                "muon_others_lr, the rate of everything else, such as 0.01"
            )
        if parse_batch_size(self.batch_size).finds and self.accumulate > 1:
            raise InputError(
                f"batch_size = {self.batch_size!r} finds out how much to accumulate: leave "
                f"accumulate = {self.accumulate} out, and name the samples of a step, as in 'auto:512'"
            )
        if self.start_size is not None:
            _check_start_size(self)
        self.named_schedule()
        if self.target is not None:
            split_names(self.target)
        tracker_list(self.track)
        teacher_runs(self.teacher)
        parse_betas(self.betas)
        for name in ("teacher_weight", "temperature"):
            if getattr(self, name) is not None and self.teacher is None:
                raise InputError(f"{name} has no effect without a teacher: leave it out")
        _check_sharding(self)
        if self.portable_bits is not None:
            _check_portable_bits(self)
        if self.parts is not None:
            _check_parts(self)


def _check_start_size(settings: Settings) -> None:
    """Refuse what does not work with images that grow."""
    of_early_figures = "figures before the full size tell little"
    refused = (
        ("compile", settings.compile != "none", "the model would be compiled for each size"),
        ("early_stop", settings.early_stop > 0, of_early_figures),
        ("schedule", settings.schedule == "plateau", of_early_figures),
    )
    for name, is_given, reason in refused:
        if is_given:
            raise InputError(
                f"start_size = {settings.start_size} and {name} = {getattr(settings, name)!r} do not go "
                f"together, as {reason}: leave one of them out"
            )


def _check_sharding(settings: Settings) -> None:
    """Refuse what does not work with sharded weights."""
    if settings.shard != "none" and settings.compression != "none":
        raise InputError(
            f"compression = {settings.compression!r} has no effect with shard = {settings.shard!r}: leave "
            "one of them out"
        )
    if settings.shard != "none" and settings.compile != "none":
        raise InputError(
            f"shard = {settings.shard!r} and compile = {settings.compile!r} do not go together: leave one out"
        )
    if settings.shard != "none" and settings.qat:
        raise InputError(f"shard = {settings.shard!r} and qat do not go together: leave one out")
    if settings.shard != "none" and settings.optimizer == "muon":
        raise InputError(
            f"shard = {settings.shard!r} leaves each process a piece of a matrix, and optimizer = 'muon' "
            "needs whole ones: leave one of them out"
        )


def _check_parts(settings: Settings) -> None:
    """Refuse what does not work with fixed parts, as far as `Run` cannot see it, or only later."""
    parts = f"parts = {settings.parts}"
    if parse_batch_size(settings.batch_size).finds:
        raise InputError(
            f"{parts} cut a step of known size, and batch_size = {settings.batch_size!r} finds one: give a "
            "number"
        )
    if settings.sync_bn and settings.compile != "none":
        raise InputError(
            f"{parts} and compile = {settings.compile!r}: with sync_bn the model is cut at each of its "
            "layers, and which pieces torch compiles depends on the process; leave one of them out"
        )
    if settings.shard != "none":
        raise InputError(
            f"{parts}: with shard = {settings.shard!r} gradients are added in the order of the processes; "
            "leave one of them out"
        )


def _check_portable_bits(settings: Settings) -> None:
    """Refuse what was not shown to give the same bits on other processors."""
    known = {
        "device": ("auto", "cpu"),
        "precision": ("auto", "fp32"),
        "compile": ("none",),
        "start_size": (None,),
        "shard": ("none",),
        "parts": (None,),
        "qat": (False,),
        "optimizer": (None, *OPTIMIZERS),
    }
    for name, values in known.items():
        value = getattr(settings, name)
        if value not in values:
            shown = " or ".join(repr(one) for one in values if one not in (None, "auto"))
            better = f"use {shown}" if shown else f"leave {name} out"
            raise InputError(
                f"portable_bits = {settings.portable_bits}: with {name} = {value!r} the bits depend on the "
                f"processor, or were not compared; {better}"
            )


def split_names(target: str) -> list[str]:
    """The columns of `target`; InputError: an empty name, or one that stands there twice."""
    names = [name.strip() for name in target.split(",")]
    if "" in names or len({*names}) < len(names):
        raise InputError(
            "target must name columns once each, with commas between them, such as age,weight; got "
            f"{target!r}"
        )
    return names


def teacher_runs(teacher: str | None) -> list[str]:
    """The folders that `teacher` names: one, perhaps with a comma in it, or several between commas."""
    if teacher is None:
        return []
    if "," not in teacher or Path(teacher).is_dir():
        return [teacher]
    names = [name.strip() for name in teacher.split(",")]
    if "" in names or len({*names}) < len(names):
        raise InputError(
            "teacher must name run folders once each, with commas between them, such as runs/a,runs/b; got "
            f"{teacher!r}"
        )
    return names


class BatchSize(NamedTuple):
    """The meaning of `batch_size`.

    Attributes:
        num: samples per forward pass, or per step if `finds`; None: chosen from the data.
    """

    num: int | None
    finds: bool = False


def parse_batch_size(value: int | str | None) -> BatchSize:
    """Read a number, 'auto', or 'auto:N'."""
    if not isinstance(value, str):
        return BatchSize(value)
    match = re.fullmatch(r"auto(?::0*([1-9][0-9]{0,17}))?", value)
    if match is None:
        raise InputError(
            "batch_size must be a whole number, 'auto', or 'auto:N' for steps of N samples, got "
            f"{value!r:.200}"
        )
    return BatchSize(int(match[1]) if match[1] else None, finds=True)


def parse_betas(text: str | None) -> tuple[float, float] | None:
    """The two numbers of `betas`; InputError: not two numbers from 0 to below 1."""
    if text is None:
        return None
    try:
        first, second = map(float, text.split(","))
        good = 0 <= first < 1 and 0 <= second < 1
    except ValueError:
        good = False
    if not good:
        raise InputError(
            f"betas must be two numbers from 0 to below 1, such as 0.9,0.999; got {text!r}"
        )
    return first, second


FIELDS = options_of(Settings)
"""Every setting by name, in the order of `--help`."""
