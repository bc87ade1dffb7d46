import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Trajectories(Dataset):
    def __init__(self, n):
        g = torch.Generator().manual_seed(8)
        self.start = torch.randn(n, 4, generator=g)
        self.end = torch.stack(
            [
                self.start[:, 0] + self.start[:, 2],
                self.start[:, 1] + self.start[:, 3] - 0.5,
            ],
            dim=1,
        )

    def __len__(self):
        return len(self.start)

    def __getitem__(self, i):
        return {"start": self.start[i], "end": self.end[i]}


def get_batch(loader):
    return next(iter(loader))


def main():
    torch.manual_seed(0)
    loader = DataLoader(Trajectories(1000), batch_size=16)
    model = nn.Sequential(nn.Linear(4, 64), nn.ELU(), nn.Linear(64, 2))
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-3)
    max_steps = 100
    for step in range(max_steps):
        batch = get_batch(loader)
        predicted = model(batch["start"])
        loss = (predicted - batch["end"]).square().sum(dim=1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 1 == 0:
            print("step", step, "loss", f"{loss:.4f}")


if __name__ == "__main__":
    main()
