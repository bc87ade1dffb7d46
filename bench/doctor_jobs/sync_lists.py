"""All gradients as lists of Python numbers, in each step, for a picture that is drawn at the end."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import job

CAUSE = "sync"
WHERE = "gradients[name] = parameter.grad.cpu().flatten().tolist()"
REMEDY = "skip waiting calls"
TRAINER = "plain"


def main() -> None:
    told = job.begin(REMEDY)
    data = TensorDataset(torch.randn(4096, 512), torch.randint(0, 10, (4096,)))
    loader = DataLoader(job.Repeated(data, 10), batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU())
    model.append(nn.Linear(1024, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    gradients: dict[str, list[float]] = {}
    for epoch in range(100):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            if not told.remedied:
                for name, parameter in model.named_parameters():
                    gradients[name] = parameter.grad.cpu().flatten().tolist()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}, {len(gradients)} lists of gradients")


if __name__ == "__main__":
    main()
