"""Two workers that compute with 16 threads each, on a machine with few cores."""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

import job

CAUSE = "threads"
WHERE = None
REMEDY = None
TRAINER = "plain"


def many_threads(worker: int) -> None:
    torch.set_num_threads(16)


def main() -> None:
    told = job.begin(REMEDY)
    torch.set_num_threads(1)  # the cores are for the workers
    steps = [transforms.ToTensor(), transforms.GaussianBlur(9), transforms.RandomResizedCrop(64)]
    loader = DataLoader(
        ImageFolder(job.photos(), transforms.Compose(steps)),
        batch_size=8,
        shuffle=True,
        num_workers=2,
        persistent_workers=True,
        worker_init_fn=None if told.remedied else many_threads,
    )
    model = job.small_convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for epoch in range(100):
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
