import torch
from torch import nn, optim


def build(config):
    layers = []
    width = config["inputs"]
    for hidden in config["hidden"]:
        layers += [nn.Linear(width, hidden), nn.Tanh()]
        width = hidden
    layers.append(nn.Linear(width, config["classes"]))
    return nn.Sequential(*layers)


def batches(x, y, size):
    while True:
        order = torch.randperm(len(x))
        for i in range(0, len(x) - size + 1, size):
            chosen = order[i : i + size]
            yield x[chosen], y[chosen]


def forward_backward(model, criterion, batch):
    x, y = batch
    loss = criterion(model(x), y)
    loss.backward()
    return loss.detach()


def apply_update(model, optimizer, max_norm):
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()


def main():
    torch.manual_seed(0)
    config = {"inputs": 16, "hidden": [64, 32], "classes": 3, "lr": 0.05, "steps": 100}
    x = torch.randn(900, 16)
    w = torch.randn(16, 3)
    y = (x @ w).argmax(1)
    model = build(config)
    optimizer = optim.SGD(model.parameters(), lr=config["lr"])
    criterion = nn.CrossEntropyLoss()
    stream = batches(x, y, 30)
    for step in range(config["steps"]):
        loss = forward_backward(model, criterion, next(stream))
        apply_update(model, optimizer, 5.0)
        print(f"step {step} loss {loss:.4f}")


main()
