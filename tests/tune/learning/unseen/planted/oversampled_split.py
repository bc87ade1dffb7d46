import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


def rare_disease(n):
    x = torch.randn(n, 14)
    y = (x[:, 0] + x[:, 1] > 2.0).float()
    return x, y


def balance(x, y):
    """Repeats the rare class until both are equally frequent."""
    rare = torch.where(y == 1)[0]
    times = int((y == 0).sum() // len(rare))
    chosen = torch.cat([torch.where(y == 0)[0], rare.repeat(times)])
    return x[chosen], y[chosen]


def evaluate(model, loader):
    model.eval()
    total = 0.0
    with torch.no_grad():
        for x, y in loader:
            logits = model(x).squeeze(1)
            total += nn.functional.binary_cross_entropy_with_logits(logits, y, reduction="sum").item()
    model.train()
    return total / len(loader.dataset)


def main():
    torch.manual_seed(0)
    x, y = balance(*rare_disease(700))
    dataset = TensorDataset(x, y)
    n = len(dataset) * 4 // 5
    train_set, val_set = random_split(dataset, [n, len(dataset) - n])
    train_loader = DataLoader(train_set, batch_size=64, shuffle=True)
    val_loader = DataLoader(val_set, batch_size=64)
    model = nn.Sequential(nn.Linear(14, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    step = 0
    for epoch in range(6):
        for bx, by in train_loader:
            loss = nn.functional.binary_cross_entropy_with_logits(model(bx).squeeze(1), by)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"step {step} loss {loss.item():.4f}")
            step += 1
        print(f"epoch {epoch} val {evaluate(model, val_loader):.4f}")


main()
