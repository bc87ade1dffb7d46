import torch


def train_epoch(model, loader, optimizer, criterion, steps=4):
    model.train()
    optimizer.zero_grad()
    for i, (x, y) in enumerate(loader):
        loss = criterion(model(x), y) / steps
        loss.backward()
        if (i + 1) % steps == 0:
            optimizer.step()
            optimizer.zero_grad()
