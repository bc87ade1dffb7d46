"""24 workers on a machine with few cores, started again for each epoch of 40 steps."""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Subset
from torchvision import transforms
from torchvision.datasets import ImageFolder

import job

CAUSE = "many workers"
WHERE = None
REMEDY = "workers=2"
TRAINER = "plain"


def main() -> None:
    told = job.begin(REMEDY)
    torch.set_num_threads(1)  # the cores are for the workers
    steps = [transforms.RandomResizedCrop(64), transforms.ToTensor()]
    data = Subset(ImageFolder(job.photos(), transforms.Compose(steps)), range(640))
    workers = told.number if told.remedied else 24
    loader = DataLoader(data, batch_size=16, shuffle=True, num_workers=workers)
    model = job.small_convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for epoch in range(1000):
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
