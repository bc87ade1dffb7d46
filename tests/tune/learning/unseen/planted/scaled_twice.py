import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Shapes(Dataset):
    """Bars of different width, as bytes."""

    def __init__(self, n):
        g = torch.Generator().manual_seed(0)
        self.labels = torch.randint(3, (n,), generator=g)
        self.raw = torch.randint(0, 60, (n, 1, 20, 20), generator=g, dtype=torch.uint8)
        for image, label in zip(self.raw, self.labels):
            image[:, :, 4 : 7 + 4 * int(label)] += 150

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.raw[i].float() / 255.0, self.labels[i]


class Normalize(nn.Module):
    def __init__(self, mean, std):
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean))
        self.register_buffer("std", torch.tensor(std))

    def forward(self, x):
        return (x / 255.0 - self.mean) / self.std


def network():
    return nn.Sequential(
        Normalize(0.45, 0.22),
        nn.Conv2d(1, 8, 5, stride=2),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 9, 3),
    )


def main():
    torch.manual_seed(1)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(Shapes(480), batch_size=16, shuffle=True)
    step = 0
    for _ in range(3):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"step {step} loss {loss.item():.4f}")
            step += 1


main()
