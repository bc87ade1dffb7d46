"""Photographs on a network drive that gives 5 MB per second, to all workers together."""

import io
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

import job

CAUSE = "read"
WHERE = "content = self.files[index].read_bytes()"
REMEDY = "cached batches"
TRAINER = "plain"


class Photos(Dataset):
    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.rglob("*.jpg"))
        self.transform = transforms.Compose(
            [
                transforms.RandomResizedCrop(64),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
            ]
        )

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        content = self.files[index].read_bytes()
        image = Image.open(io.BytesIO(content)).convert("RGB")
        return self.transform(image), int(self.files[index].parent.name[-1])


def main() -> None:
    told = job.begin(REMEDY)
    torch.set_num_threads(1)  # the cores are for the workers
    job.on_slow_disk(job.photos(), mb_per_s=5)
    loader = DataLoader(
        Photos(job.photos()), batch_size=16, shuffle=True, num_workers=2, persistent_workers=True
    )
    if told.remedied:
        loader = job.Cached(loader)
    model = job.small_convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for epoch in range(1000):
        total = 0.0
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch}: loss {total / len(loader):.3f}")


if __name__ == "__main__":
    main()
