import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Expert(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.up = nn.Linear(d, 2 * d)
        self.down = nn.Linear(2 * d, d)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class MixtureOfExperts(nn.Module):
    def __init__(self, d, n):
        super().__init__()
        self.gate = nn.Linear(d, n)
        self.experts = {f"expert{i}": Expert(d) for i in range(n)}
        self.norm = nn.LayerNorm(d)

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        outs = torch.stack([e(x) for e in self.experts.values()], dim=1)
        return self.norm(x + (weights.unsqueeze(-1) * outs).sum(1))


class Net(nn.Module):
    def __init__(self, inputs, d=24, classes=4):
        super().__init__()
        self.embed = nn.Linear(inputs, d)
        self.moe = MixtureOfExperts(d, 3)
        self.head = nn.Linear(d, classes)

    def forward(self, x):
        return self.head(self.moe(self.embed(x)))


def main():
    torch.manual_seed(0)
    x = torch.randn(1024, 9)
    y = (x[:, :3].abs().argmax(1) + (x[:, 4] > 1).long()).clamp(max=3)
    model = Net(9)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    step = 0
    for _ in range(3):
        for bx, by in DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(bx), by)
            loss.backward()
            optimizer.step()
            print(f"step {step} loss {loss.item():.4f}")
            step += 1


main()
