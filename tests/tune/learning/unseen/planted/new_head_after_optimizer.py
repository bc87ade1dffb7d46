import torch
from torch import nn


class SmallNet(nn.Module):
    def __init__(self, classes=10):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3), nn.ReLU()
        )
        self.fc = nn.Linear(16, classes)

    def forward(self, x):
        return self.fc(self.features(x).mean((2, 3)))


def colored(n):
    labels = torch.randint(3, (n,))
    images = torch.randn(n, 3, 12, 12) * 0.5
    images[torch.arange(n), labels] += 0.7
    return images, labels


def make_optimizer(model):
    decay, no_decay = [], []
    for p in model.parameters():
        (decay if p.ndim > 1 else no_decay).append(p)
    return torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.01}, {"params": no_decay, "weight_decay": 0.0}], lr=1e-3
    )


def adapt(model, classes):
    model.fc = nn.Linear(model.fc.in_features, classes)
    nn.init.normal_(model.fc.weight, std=0.02)
    nn.init.zeros_(model.fc.bias)
    return model


def main():
    torch.manual_seed(0)
    model = SmallNet()
    optimizer = make_optimizer(model)
    model = adapt(model, classes=3)
    images, labels = colored(600)
    for step in range(80):
        i = torch.randint(600, (24,))
        loss = nn.functional.cross_entropy(model(images[i]), labels[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")


main()
