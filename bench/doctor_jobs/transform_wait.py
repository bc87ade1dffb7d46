"""A transform that asks a server about each photograph and waits for its answer. Lightning."""

import time
from pathlib import Path

import lightning
import torch
import torch.nn.functional as F
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

import job

CAUSE = "transform"
WHERE = "time.sleep(0.015)  # the answer takes so long"
REMEDY = "cached batches"
TRAINER = "lightning"


class CropOfServer:
    """The part of the image that a server proposes."""

    def __call__(self, image: Image.Image) -> Image.Image:
        time.sleep(0.015)  # the answer takes so long
        return image.crop((50, 0, 350, 300))


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = job.small_convnet()

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.model(images), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def loader_of(folder: Path) -> DataLoader:
    steps = [CropOfServer(), transforms.Resize(64), transforms.ToTensor()]
    data = ImageFolder(folder, transforms.Compose(steps))
    return DataLoader(data, batch_size=16, shuffle=True, num_workers=2, persistent_workers=True)


def main() -> None:
    told = job.begin(REMEDY)
    loader = loader_of(job.photos())
    if told.remedied:
        loader = job.Cached(loader)
    trainer = lightning.Trainer(
        max_epochs=100, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False
    )
    trainer.fit(Classifier(), loader)


if __name__ == "__main__":
    main()
