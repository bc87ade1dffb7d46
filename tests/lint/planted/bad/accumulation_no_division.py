# planted: line 13, gradient accumulation without dividing the loss; in all versions
import torch

accumulation_steps = 4


def train_epoch(model, loader, optimizer, criterion, device):
    model.train()
    optimizer.zero_grad()
    for i, (inputs, labels) in enumerate(loader):
        outputs = model(inputs.to(device))
        loss = criterion(outputs, labels.to(device))
        loss.backward()
        if (i + 1) % accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
