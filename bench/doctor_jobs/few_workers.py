"""One worker for photographs on a network drive, each of which takes 8 ms to come. accelerate."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

import job

CAUSE = "few workers"
WHERE = None
REMEDY = "workers=4"
TRAINER = "accelerate"


def main() -> None:
    told = job.begin(REMEDY)
    torch.set_num_threads(1)  # the cores are for the workers
    job.on_slow_disk(job.photos(), delay_ms=8)
    steps = [transforms.RandomResizedCrop(64), transforms.ToTensor()]
    data = ImageFolder(job.photos(), transforms.Compose(steps))
    workers = told.number if told.remedied else 1
    loader = DataLoader(
        data, batch_size=16, shuffle=True, num_workers=workers, persistent_workers=True
    )
    model = job.small_convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(100):
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        accelerator.print(f"epoch {epoch}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
