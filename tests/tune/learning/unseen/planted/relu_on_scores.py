import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def block(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, outputs), nn.ReLU())


def build(sizes):
    return nn.Sequential(*(block(a, b) for a, b in zip(sizes, sizes[1:])))


def make_blobs(n, classes, d):
    centers = torch.randn(classes, d) * 1.5
    labels = torch.randint(classes, (n,))
    return TensorDataset(centers[labels] + torch.randn(n, d), labels)


def train(model, dataset, epochs):
    criterion = nn.CrossEntropyLoss(label_smoothing=0.05)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step = 0
    for _ in range(epochs):
        for x, y in DataLoader(dataset, batch_size=25, shuffle=True):
            scores = model(x)
            loss = criterion(scores, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"step {step} loss {loss.item():.4f}")
            step += 1


if __name__ == "__main__":
    torch.manual_seed(3)
    train(build([10, 64, 32, 8]), make_blobs(1000, 8, 10), 2)
