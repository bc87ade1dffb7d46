"""A peer of bench/train_end_to_end.py: trains ResNet-18 on class folders, as its project shows it.

    python bench/end_to_end_peers.py lightning|torchvision DATA --out FOLDER --size PIXELS --epochs N
        --workers N --seed N --precision bf16|fp32

`lightning`: a LightningModule with Lightning's Trainer and its ModelCheckpoint. `torchvision`: the loop of
its references/classification/train.py with its presets, meters, evaluation and checkpoints, for one process;
that script has no bfloat16, which is added here. Both get what makes them fastest on a CPU: channels_last,
bfloat16 where told, workers that stay, fused SGD. The figures of the last line are the best evaluation's.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder

BATCH, MOMENTUM, WEIGHT_DECAY = 64, 0.9, 5e-4  # the defaults of `flambeau train`
WARMUP, CROP_SCALE, EVAL_SHARE = 0.1, (0.25, 1.0), 0.875  # these, too
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
Loader = Iterable[tuple[Tensor, Tensor]]


def loaders(told: argparse.Namespace) -> tuple[DataLoader[Any], DataLoader[Any]]:
    normalize = [v1.PILToTensor(), v1.ConvertImageDtype(torch.float32), v1.Normalize(MEAN, STD)]
    train = v1.Compose([
        v1.RandomResizedCrop(told.size, CROP_SCALE), v1.RandomHorizontalFlip(), *normalize,
    ])  # fmt: skip
    side = round(told.size / EVAL_SHARE)
    evaluation = v1.Compose([v1.Resize(side), v1.CenterCrop(told.size), *normalize])
    common: dict[str, Any] = {
        "num_workers": told.workers, "persistent_workers": told.workers > 0,
    }  # fmt: skip
    return (
        DataLoader(ImageFolder(told.data / "train", train), BATCH, shuffle=True, **common),
        DataLoader(ImageFolder(told.data / "val", evaluation), BATCH, **common),
    )


def new_model() -> nn.Module:
    model = torchvision.models.resnet18(num_classes=10)
    return model.to(memory_format=torch.channels_last)


def new_optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        model.parameters(), lr, MOMENTUM, weight_decay=WEIGHT_DECAY, nesterov=True, fused=True
    )


def multiplier(steps: int) -> Callable[[int], float]:
    """Of the learning rate, per step: linear warm-up, then a cosine."""
    warmup = max(1, round(WARMUP * steps))

    def at(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))) / 2

    return at


def by_lightning(told: argparse.Namespace) -> float:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = new_model()

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            images, targets = batch
            logits = self.model(images.contiguous(memory_format=torch.channels_last))
            loss = nn.functional.cross_entropy(logits, targets)
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
            images, targets = batch
            logits = self.model(images.contiguous(memory_format=torch.channels_last))
            self.log("val_loss", nn.functional.cross_entropy(logits, targets))
            self.log("val_accuracy", (logits.argmax(1) == targets).float().mean())

        def configure_optimizers(self) -> Any:
            optimizer = new_optimizer(self.model, told.lr)
            steps = int(self.trainer.estimated_stepping_batches)
            schedule = LambdaLR(optimizer, multiplier(steps))
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    lightning.seed_everything(told.seed)
    train, evaluation = loaders(told)
    best = ModelCheckpoint(monitor="val_accuracy", mode="max")
    trainer = lightning.Trainer(
        max_epochs=told.epochs,
        accelerator="cpu",
        precision="bf16-mixed" if told.precision == "bf16" else "32-true",
        default_root_dir=told.out,
        callbacks=[best],
        logger=False,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
    )
    trainer.fit(Classifier(), train, evaluation)
    assert best.best_model_score is not None
    return float(best.best_model_score)


class Meter:
    """As SmoothedValue in torchvision's utils.py: the mean of what was seen."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, value: float, n: int) -> None:
        self.total += value * n
        self.count += n

    @property
    def mean(self) -> float:
        return self.total / self.count


def accuracy(logits: Tensor, targets: Tensor) -> list[Tensor]:
    """Shares of the batch within the first 1 and 5, as torchvision's utils.accuracy."""
    with torch.inference_mode():
        _, order = logits.topk(5, 1, True, True)
        correct = order.t().eq(targets[None])
        return [correct[:k].flatten().sum(dtype=torch.float32) / len(targets) for k in (1, 5)]


def by_torchvision(told: argparse.Namespace) -> float:
    torch.manual_seed(told.seed)
    train, evaluation = loaders(told)
    model = new_model()
    optimizer = new_optimizer(model, told.lr)
    schedule = LambdaLR(optimizer, multiplier(told.epochs * len(train)))
    criterion = nn.CrossEntropyLoss()
    best = 0.0

    def logits_of(images: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=told.precision == "bf16"):
            logits: Tensor = model(images.contiguous(memory_format=torch.channels_last))
        return logits.float()

    for epoch in range(told.epochs):
        train_one_epoch(model, train, logits_of, criterion, optimizer, schedule)
        best = max(best, evaluated(model, evaluation, logits_of, criterion))
        state = {
            "model": model.state_dict(), "optimizer": optimizer.state_dict(),
            "lr_scheduler": schedule.state_dict(), "epoch": epoch, "args": vars(told),
        }  # fmt: skip
        torch.save(state, told.out / f"model_{epoch}.pth")
        torch.save(state, told.out / "checkpoint.pth")
    return best


def train_one_epoch(
    model: nn.Module,
    loader: Loader,
    logits_of: Callable[[Tensor], Tensor],
    criterion: Callable[[Tensor, Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    schedule: LambdaLR,
) -> None:
    model.train()
    meters = Meter(), Meter(), Meter()
    for images, targets in loader:
        logits = logits_of(images)
        loss = criterion(logits, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        for meter, value in zip(meters, (loss, *accuracy(logits, targets)), strict=True):
            meter.update(value.item(), len(images))


def evaluated(
    model: nn.Module,
    loader: Loader,
    logits_of: Callable[[Tensor], Tensor],
    criterion: Callable[[Tensor, Tensor], Tensor],
) -> float:
    model.eval()
    meters = Meter(), Meter(), Meter()
    with torch.inference_mode():
        for images, targets in loader:
            logits = logits_of(images)
            values = criterion(logits, targets), *accuracy(logits, targets)
            for meter, value in zip(meters, values, strict=True):
                meter.update(value.item(), len(images))
    return meters[1].mean


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("peer", choices=["lightning", "torchvision"])
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    for name in ("size", "epochs", "workers", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--precision", choices=["bf16", "fp32"], required=True)
    told = parser.parse_args()
    told.out.mkdir(parents=True, exist_ok=True)
    best = {"lightning": by_lightning, "torchvision": by_torchvision}[told.peer](told)
    print(json.dumps({"val_accuracy": best}), flush=True)


if __name__ == "__main__":
    main()
