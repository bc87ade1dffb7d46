"""16 threads for torch, set for a larger machine, on one with few cores."""

import timm
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import job

CAUSE = "threads"
WHERE = None
REMEDY = "threads=2"
TRAINER = "plain"


def main() -> None:
    told = job.begin(REMEDY)
    torch.set_num_threads(told.number if told.remedied else 16)
    data = TensorDataset(torch.randn(512, 3, 64, 64), torch.randint(0, 10, (512,)))
    loader = DataLoader(job.Repeated(data, 20), batch_size=16, shuffle=True)
    model = timm.create_model("test_resnet", num_classes=10)
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
