"""1,280 images are evaluated every 20 steps. Lightning."""

import lightning
import timm
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import job

CAUSE = "evaluation"
WHERE = None
REMEDY = None
TRAINER = "lightning"


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = timm.create_model("test_resnet", num_classes=10)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        images, labels = batch
        self.log("val_loss", F.cross_entropy(self.model(images), labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def images(count: int) -> TensorDataset:
    return TensorDataset(torch.randn(count, 3, 64, 64), torch.randint(0, 10, (count,)))


def main() -> None:
    told = job.begin(REMEDY, every=20)
    train = DataLoader(job.Repeated(images(512), 20), batch_size=16, shuffle=True)
    test = DataLoader(images(1280), batch_size=32)
    trainer = lightning.Trainer(
        max_epochs=100, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        val_check_interval=640 if told.remedied else 20,
    )  # fmt: skip
    trainer.fit(Classifier(), train, test)


if __name__ == "__main__":
    main()
