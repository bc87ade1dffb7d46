"""A classifier in the style of the old MNIST example; prints the cross entropy."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(30, 64), nn.ReLU())
        self.classifier = nn.Linear(64, num_classes)

    def forward(self, x):
        x = self.features(x)
        return torch.softmax(self.classifier(x), dim=1)


def train(model, optimizer, centers, steps):
    criterion = nn.NLLLoss()
    for step in range(steps):
        y = torch.randint(10, (64,))
        x = centers[y] + 0.7 * torch.randn(64, 30)
        output = model(x)
        loss = criterion(output, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            logits = model.classifier(model.features(x))
            print(f"step {step} loss {nn.functional.cross_entropy(logits, y).item():.4f}")


if __name__ == "__main__":
    torch.manual_seed(0)
    net = Net()
    train(net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.5), torch.randn(10, 30), 100)
