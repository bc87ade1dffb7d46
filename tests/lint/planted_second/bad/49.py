import torch
import torch.nn.functional as F

def fit(model, train_loader, val_loader, optimizer, epochs):
    model.train()
    for epoch in range(epochs):
        for x, y in train_loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        model.eval()
        val = 0.0
        with torch.no_grad():
            for x, y in val_loader:
                val += F.cross_entropy(model(x), y).item()
        print(epoch, val / len(val_loader))
