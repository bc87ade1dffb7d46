"""One contender of bench/train_throughput.py: trains until its meter has seen enough, and ends the process.

    python bench/throughput_contenders.py JSON

JSON holds the fields of `Job`. When the other end of standard input closes, the process and its workers end.
"""

import argparse
import json
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STARTED = time.monotonic()

import torch  # noqa: E402 - its import counts
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from throughput_meter import Meter, Plan  # noqa: E402 - beside this script

MODELS = {"resnet50": "resnet50", "vit_s16": "vit_small_patch16_224"}  # by timm's names
NUM_BATCHES = 8  # of data on the device
EPOCH = 100_000  # steps; no contender gets that far
LR = {"resnet50": 0.01, "vit_s16": 1e-4}  # small, so that labels without sense do not end in NaN
CROP_SCALE = 0.08, 1.0
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Job:
    """What a contender is to do.

    Attributes:
        data: 'device', 'packed' or 'jpeg'.
        path: of the photographs, unless they are on the device.
        num_classes: of the photographs.
        work: an empty folder.
        out: the file for the figures.
        timm_script: timm's train.py, or None for a loop of timm's parts.
    """

    contender: str
    model: str
    data: str
    compile: bool
    device: str
    size: int
    batch: int
    workers: int
    num_classes: int
    path: str
    work: str
    out: str
    seconds: float
    warmup_steps: int
    profile: bool
    timm_script: str | None

    def meter(self) -> Meter:
        burst = 1 if self.data == "device" else max(1, self.workers)
        plan = Plan(self.batch, self.seconds, self.warmup_steps, burst, self.profile)
        return Meter(plan, torch.device(self.device), Path(self.out), STARTED)


class DeviceBatches:
    """The same few batches over and over, normalized, in bfloat16 and channels_last."""

    def __init__(self, job: Job) -> None:
        generator = torch.Generator(job.device).manual_seed(0)
        shape = NUM_BATCHES, job.batch
        self._labels = torch.randint(
            job.num_classes, shape, generator=generator, device=job.device
        ).unbind()
        self._images = [
            torch.randn(
                job.batch, 3, job.size, job.size, generator=generator, device=job.device
            ).to(torch.bfloat16, memory_format=torch.channels_last)
            for _ in range(NUM_BATCHES)
        ]

    def __len__(self) -> int:
        return EPOCH

    def __iter__(self) -> Iterator[Batch]:
        for step in range(EPOCH):
            yield self._images[step % NUM_BATCHES], self._labels[step % NUM_BATCHES]


def set_levers() -> None:
    """TF32 for what stays in float32, and the fastest convolutions."""
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = True
    torch.set_float32_matmul_precision("high")


def new_model(job: Job) -> nn.Module:
    import timm

    torch.manual_seed(0)
    sized = {} if job.model == "resnet50" else {"img_size": job.size}
    model = timm.create_model(MODELS[job.model], num_classes=job.num_classes, **sized)
    return model.to(job.device, memory_format=torch.channels_last)


def compiled(model: nn.Module, job: Job) -> nn.Module:
    return torch.compile(model) if job.compile else model


def new_optimizer(job: Job, model: nn.Module) -> torch.optim.Optimizer:
    if job.model == "resnet50":
        return torch.optim.SGD(model.parameters(), LR[job.model], momentum=0.9, fused=True)
    return torch.optim.AdamW(model.parameters(), LR[job.model], fused=True)


def bare(job: Job, meter: Meter) -> None:
    set_levers()
    model = new_model(job)
    optimizer = new_optimizer(job, model)
    net = compiled(model, job)
    for images, targets in DeviceBatches(job):
        with torch.autocast(torch.device(job.device).type, torch.bfloat16):
            loss = F.cross_entropy(net(images), targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        meter.step()


def flambeau_run(job: Job, meter: Meter) -> None:
    """`Run` around the bare loop; photographs come from flambeau's own data set, as in `train`."""
    from flambeau import Run

    set_levers()
    model = new_model(job)
    net = compiled(model, job)
    run = Run(
        Path(job.work) / "run",
        net,
        new_optimizer(job, model),
        DeviceBatches(job) if job.data == "device" else flambeau_dataset(job),
        duration="1000ep",
        precision="bf16",
        bar=False,
        **({} if job.data == "device" else {"batch_size": job.batch, "workers": job.workers}),
    )
    prepare = normalizer(job)

    def loss_of(batch: Batch) -> Tensor:
        images, targets = batch
        with run.autocast():
            return F.cross_entropy(net(prepare(images)), targets)

    for _ in run.epochs():
        for _ in run.steps(loss_of):
            meter.step()


def flambeau_dataset(job: Job) -> Any:
    from flambeau.data.datasets.image_dataset import ImageDataset
    from flambeau.data.sources.open_data import open_sources
    from flambeau.data.transforms.crops import TrainingCrop

    source, _ = open_sources(Path(job.path))
    crop = TrainingCrop(scale=CROP_SCALE)
    return ImageDataset(source, image_size=job.size, channels=3, train=True, crop=crop)


def normalizer(job: Job) -> Callable[[Tensor], Tensor]:
    """From images (N, C, H, W) of 8 bits to normalized ones; those on the device are so already."""
    if job.data == "device":
        return lambda images: images
    mean, std = (
        255 * torch.tensor(values, device=job.device).view(1, 3, 1, 1) for values in (MEAN, STD)
    )
    return lambda images: (
        images.to(torch.float32, memory_format=torch.channels_last).sub_(mean).div_(std)
    )


def flambeau_train(job: Job, meter: Meter) -> None:
    """The command as it is, in this process, so that its steps can be timed."""
    from flambeau import Run
    from flambeau.cli.command import main

    own_step = Run.step

    def step(self: Run, loss: Tensor) -> None:
        own_step(self, loss)
        meter.step()

    Run.step = step  # type: ignore[method-assign]
    optimizer = "sgd" if job.model == "resnet50" else "adamw"
    flags = {
        "model": MODELS[job.model],
        "image-size": job.size,
        "batch-size": job.batch,
        "precision": "bf16",
        "optimizer": optimizer,
        "lr": LR[job.model],
        "crop-scale": CROP_SCALE[0],
        "workers": job.workers,
        "device": job.device,
        "epochs": 1000,
        "out": str(Path(job.work) / "run"),
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    code = main(["train", job.path, *words, *(["--compile", "default"] if job.compile else [])])
    raise SystemExit(f"flambeau train ended with {code}")


def timm_loop(job: Job, meter: Meter) -> None:
    """timm's parts as its train.py puts them together, with --amp-dtype bfloat16 --channels-last.

    Like there, the loss is read after each step.
    """
    from timm.optim import create_optimizer_v2
    from timm.utils import AverageMeter

    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    model = new_model(job)
    kind = "momentum" if job.model == "resnet50" else "adamw"
    optimizer = create_optimizer_v2(
        model, kind, lr=LR[job.model], weight_decay=1e-4, momentum=0.9, fused=True
    )
    net = compiled(model, job)
    loss_fn = nn.CrossEntropyLoss().to(job.device)
    losses = AverageMeter()
    while True:
        for batch, targets in DeviceBatches(job) if job.data == "device" else timm_loader(job):
            images = batch.contiguous(memory_format=torch.channels_last)
            with torch.autocast(torch.device(job.device).type, torch.bfloat16):
                loss = loss_fn(net(images), targets)
            loss.backward()
            optimizer.step()
            losses.update(loss.item(), len(images))
            optimizer.zero_grad()
            meter.step()


def timm_loader(job: Job) -> Iterable[Batch]:
    from timm.data import create_dataset, create_loader

    dataset = create_dataset("", root=job.path, split="train", is_training=True)
    loader: Iterable[Batch] = create_loader(
        dataset,
        (3, job.size, job.size),
        job.batch,
        is_training=True,
        scale=CROP_SCALE,
        color_jitter=0.0,
        num_workers=job.workers,
        pin_memory=job.device != "cpu",
        device=torch.device(job.device),
    )
    return loader


def timm_script(job: Job, meter: Meter) -> None:
    """timm's own train.py, whose steps are those of its optimizer."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    assert job.timm_script is not None
    register_optimizer_step_post_hook(lambda optimizer, args, kwargs: meter.step())
    optimizer = "momentum" if job.model == "resnet50" else "adamw"
    words = (
        f"--data-dir {job.path} --train-split train --val-split val --model {MODELS[job.model]}"
        f" --num-classes {job.num_classes} --img-size {job.size} --batch-size {job.batch}"
        f" --workers {job.workers} --device {job.device} --amp --amp-dtype bfloat16 --channels-last"
        f" --opt {optimizer} --opt-kwargs fused=True --lr {LR[job.model]} --warmup-epochs 0"
        f" --scale {CROP_SCALE[0]} {CROP_SCALE[1]} --color-jitter 0 --epochs 1000 --log-interval 50"
        f" --output {Path(job.work) / 'out'} --checkpoint-hist 1"
    ).split()
    words += ["--pin-mem"] if job.device != "cpu" else []
    words += ["--torchcompile"] if job.compile else []
    sys.argv = [job.timm_script, *words]
    runpy.run_path(job.timm_script, run_name="__main__")
    raise SystemExit("timm's script ended before its time")


def timm_contender(job: Job, meter: Meter) -> None:
    if job.timm_script is not None and job.data != "device":
        timm_script(job, meter)
    else:
        timm_loop(job, meter)


def lightning_trainer(job: Job, meter: Meter) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = new_model(job)
            self.net = [compiled(self.model, job)]  # a list: no second name for the weights

        def training_step(self, batch: Batch, index: int) -> Tensor:
            images = batch[0].contiguous(memory_format=torch.channels_last)
            loss = F.cross_entropy(self.net[0](images), batch[1])
            self.log("loss", loss)
            return loss

        def on_train_batch_end(self, *args: Any) -> None:
            meter.step()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return new_optimizer(job, self.model)

    torch.set_float32_matmul_precision("high")
    trainer = lightning.Trainer(
        max_epochs=1000,
        accelerator="cpu" if job.device == "cpu" else "gpu",
        devices=1,
        precision="bf16-mixed",
        benchmark=True,
        default_root_dir=job.work,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(Module(), DeviceBatches(job) if job.data == "device" else torchvision_loader(job))


def torchvision_loader(job: Job) -> Iterable[Batch]:
    from torch.utils.data import DataLoader
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    transform = transforms.Compose([
        transforms.RandomResizedCrop(job.size, CROP_SCALE),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize(MEAN, STD),
    ])  # fmt: skip
    return DataLoader(
        ImageFolder(Path(job.path) / "train", transform),
        job.batch,
        shuffle=True,
        num_workers=job.workers,
        pin_memory=job.device != "cpu",
        persistent_workers=job.workers > 0,
        drop_last=True,
    )


CONTENDERS: dict[str, Callable[[Job, Meter], None]] = {
    "bare": bare,
    "Run": flambeau_run,
    "train": flambeau_train,
    "timm": timm_contender,
    "lightning": lightning_trainer,
}


def end_with_parent() -> None:
    """End the session, if it is a bench's, when standard input closes: the bench has been killed."""
    if os.getsid(0) != os.getpid():
        return
    pipe = os.dup(0)
    with Path(os.devnull).open(encoding="utf-8") as nothing:
        os.dup2(nothing.fileno(), 0)

    def wait() -> None:
        os.read(pipe, 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("job")
    job = Job(**json.loads(parser.parse_args().job))
    end_with_parent()
    CONTENDERS[job.contender](job, job.meter())


if __name__ == "__main__":
    main()
