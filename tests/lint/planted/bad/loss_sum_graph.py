# planted: line 15, total_loss += loss keeps each iteration's graph; use loss.item(); in all versions
import torch
import torch.nn as nn

criterion = nn.CrossEntropyLoss()


def train_epoch(model, loader, optimizer):
    total_loss = 0
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = criterion(model(inputs), labels)
        loss.backward()
        optimizer.step()
        total_loss += loss
    return total_loss / len(loader)
