"""Four workers that are started again for each epoch of 10 steps. Lightning."""

import lightning
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Subset
from torchvision import transforms
from torchvision.datasets import ImageFolder

import job

CAUSE = "worker start"
WHERE = None
REMEDY = "persistent workers"
TRAINER = "lightning"


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = job.small_convnet()

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def main() -> None:
    told = job.begin(REMEDY, every=10)
    torch.set_num_threads(1)  # the cores are for the workers
    steps = [transforms.RandomResizedCrop(64), transforms.ToTensor()]
    data = Subset(ImageFolder(job.photos(), transforms.Compose(steps)), range(80))
    loader = DataLoader(
        data, batch_size=8, shuffle=True, num_workers=4, persistent_workers=told.remedied
    )
    trainer = lightning.Trainer(
        max_epochs=2000, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False
    )
    trainer.fit(Classifier(), loader)


if __name__ == "__main__":
    main()
