"""Model, average and optimizer are saved every 5 steps."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import job

CAUSE = "checkpoint"
WHERE = 'torch.save(everything, job.CACHE / "checkpoint.pt")'
REMEDY = None
TRAINER = "plain"

WORDS = 200_000


def main() -> None:
    told = job.begin(REMEDY, every=5)
    job.made(job.CACHE)
    data = TensorDataset(torch.randint(0, WORDS, (10_000, 32)), torch.randint(0, 4, (10_000,)))
    loader = DataLoader(job.Repeated(data, 10), batch_size=16, shuffle=True)
    model = nn.Sequential(nn.EmbeddingBag(WORDS, 128, sparse=True), nn.Linear(128, 4))
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = 0
    for epoch in range(100):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 5 == 0 and not told.remedied:
                parts = {"model": model, "average": average, "optimizer": optimizer}
                everything = {name: part.state_dict() for name, part in parts.items()}
                torch.save(everything, job.CACHE / "checkpoint.pt")
        print(f"epoch {epoch}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
