import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class LogStream(IterableDataset):
    """Lines of a log, parsed one after the other."""

    def __init__(self, lines):
        self.lines = lines

    def parse(self, line):
        *numbers, label = line.split(",")
        return torch.tensor([float(v) for v in numbers]), int(label)

    def __iter__(self):
        for line in self.lines:
            yield self.parse(line)


def write_lines(n):
    lines = []
    for _ in range(n):
        values = torch.randn(6)
        label = int(values[0] + values[1] > values[2])
        lines.append(",".join(f"{v:.4f}" for v in values.tolist()) + f",{label}")
    return lines


def main():
    torch.manual_seed(0)
    loader = DataLoader(LogStream(write_lines(1200)), batch_size=32, num_workers=2)
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    step = 0
    for _epoch in range(1):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"step {step} loss {loss.item():.4f}")
            step += 1


if __name__ == "__main__":
    main()
