import numpy as np
import torch
from torch import nn


def read_files(n=1200):
    """Two 'files' that share an id: features and outcomes."""
    rng = np.random.default_rng(3)
    ids = rng.permutation(n)
    features = rng.normal(size=(n, 8)).astype(np.float32)
    outcome = (features[:, 0] - features[:, 3] + 0.2 * rng.normal(size=n) > 0).astype(np.int64)
    return ids, features, outcome


def prepare(ids, features, outcome):
    order = np.argsort(ids)
    x = torch.from_numpy(features[order])
    y = torch.from_numpy(outcome)
    return x, y


def accuracy(model, x, y):
    model.eval()
    with torch.no_grad():
        right = (model(x).argmax(1) == y).float().mean().item()
    model.train()
    return right


def main():
    torch.manual_seed(0)
    x, y = prepare(*read_files())
    x_train, y_train, x_val, y_val = x[:1000], y[:1000], x[1000:], y[1000:]
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    step = 0
    for epoch in range(4):
        for i in torch.randperm(1000).split(50):
            loss = nn.functional.cross_entropy(model(x_train[i]), y_train[i])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"step {step} loss {loss.item():.4f}")
            step += 1
        print(f"epoch {epoch} accuracy {accuracy(model, x_val, y_val):.3f}")


main()
