"""A median filter over whole photographs before they are shrunk. The Trainer of transformers."""

import torch
import torch.nn.functional as F
from PIL import Image, ImageFilter
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms
from torchvision.datasets import ImageFolder
from transformers import Trainer, TrainingArguments

import job

CAUSE = "transform"
WHERE = "return image.filter(ImageFilter.MedianFilter(3))"
REMEDY = "cached batches"
TRAINER = "transformers"


def denoised(image: Image.Image) -> Image.Image:
    return image.filter(ImageFilter.MedianFilter(3))


class Photos(Dataset):
    def __init__(self) -> None:
        steps = [denoised, transforms.RandomResizedCrop(64), transforms.ToTensor()]
        self.images = ImageFolder(job.photos(), transforms.Compose(steps))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Tensor | int]:
        image, label = self.images[index]
        return {"pixel_values": image, "labels": label}


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = job.small_convnet()

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.model(pixel_values)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class CachedTrainer(Trainer):
    def get_train_dataloader(self) -> DataLoader:
        return job.Cached(super().get_train_dataloader())


def main() -> None:
    told = job.begin(REMEDY)
    torch.set_num_threads(1)  # the cores are for the workers
    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir=f"{job.CACHE / 'transformers'}",
        num_train_epochs=100,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        dataloader_num_workers=2,
        dataloader_persistent_workers=True,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
    )
    trainer = CachedTrainer if told.remedied else Trainer
    trainer(Classifier(), arguments, train_dataset=Photos()).train()


if __name__ == "__main__":
    main()
