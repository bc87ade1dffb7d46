# planted: line 12, torch.cuda.empty_cache() in each step: slow; in all versions
import torch


def train(model, loader, optimizer, criterion):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x.cuda()), y.cuda())
        loss.backward()
        optimizer.step()
        torch.cuda.empty_cache()
