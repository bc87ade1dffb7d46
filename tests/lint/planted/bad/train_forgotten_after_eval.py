# planted: line 14, model.eval() inside the epoch loop, train() only once before it; in all versions
import torch
import torch.nn as nn


def fit(model, train_loader, val_loader, optimizer, epochs):
    loss_fn = nn.CrossEntropyLoss()
    model.train()
    for epoch in range(epochs):
        for x, y in train_loader:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            acc = sum((model(x).argmax(1) == y).sum().item() for x, y in val_loader)
        print(epoch, acc)
