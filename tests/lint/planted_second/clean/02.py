import torch
import torch.nn.functional as F

def train(model, loader, optimizer, accum=4):
    model.train()
    optimizer.zero_grad()
    for i, (x, y) in enumerate(loader, 1):
        loss = F.cross_entropy(model(x), y) / accum
        loss.backward()
        if i % accum == 0:
            optimizer.step()
            optimizer.zero_grad()
