"""Groups without weight decay, a lower rate below, an average of the weights for evaluation."""

import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class EMA:
    def __init__(self, model, decay=0.98):
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for mine, theirs in zip(self.model.state_dict().values(), model.state_dict().values()):
            if mine.is_floating_point():
                mine.lerp_(theirs, 1 - self.decay)
            else:
                mine.copy_(theirs)


def groups(model, lr, decay):
    for name, module in model.named_children():
        scale = 0.2 if name == "stem" else 1.0
        weights = [p for p in module.parameters() if p.ndim > 1]
        others = [p for p in module.parameters() if p.ndim <= 1]
        yield {"params": weights, "lr": lr * scale, "weight_decay": decay}
        yield {"params": others, "lr": lr * scale, "weight_decay": 0.0}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(10, 64)
        self.norm = nn.BatchNorm1d(64)
        self.head = nn.Linear(64, 3)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.stem(x))))


def accuracy(model, x, y):
    was = model.training
    model.eval()
    with torch.inference_mode():
        right = (model(x).argmax(1) == y).float().mean().item()
    model.train(was)
    return right


def main():
    torch.manual_seed(0)
    x = torch.randn(1300, 10)
    y = (x[:, :3] + 0.3 * torch.randn(1300, 3)).argmax(1)
    loader = DataLoader(TensorDataset(x[:1000], y[:1000]), batch_size=40, shuffle=True)
    model = Net()
    ema = EMA(model)
    optimizer = torch.optim.AdamW(groups(model, 4e-3, 0.1))
    step = 0
    for epoch in range(4):
        for bx, by in loader:
            loss = nn.functional.cross_entropy(model(bx), by)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.update(model)
            print(f"step {step} loss {loss.item():.4f}")
            step += 1
        print(epoch, accuracy(model, x[1000:], y[1000:]), accuracy(ema.model, x[1000:], y[1000:]))


main()
