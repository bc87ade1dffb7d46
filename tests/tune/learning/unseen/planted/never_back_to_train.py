import torch
from torch import nn


class ConvClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 12, 3, padding=1)
        self.bn = nn.BatchNorm2d(12)
        self.drop = nn.Dropout(0.25)
        self.fc = nn.Linear(12, 2)

    def forward(self, x):
        x = torch.relu(self.bn(self.conv(x)))
        return self.fc(self.drop(x.amax((2, 3))))


def crosses(n):
    y = torch.randint(2, (n,))
    x = torch.randn(n, 1, 10, 10) * 0.4
    x[y == 1, :, 5, :] += 1.5
    x[y == 0, :, 4:6, 2:5] += 1.5
    return x, y


def validate(model, x, y):
    model.eval()
    with torch.no_grad():
        logits = model(x)
        return nn.functional.cross_entropy(logits, y).item()


def main():
    torch.manual_seed(0)
    x, y = crosses(700)
    model = ConvClassifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model.train()
    step = 0
    for epoch in range(8):
        for i in torch.randperm(600).split(60):
            loss = nn.functional.cross_entropy(model(x[i]), y[i])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"step {step} loss {loss.item():.4f}")
            step += 1
        print(f"epoch {epoch} validation {validate(model, x[600:], y[600:]):.4f}")


main()
