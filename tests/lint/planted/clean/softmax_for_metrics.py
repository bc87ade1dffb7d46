import torch
import torch.nn.functional as F


def train_step(model, opt, x, y):
    logits = model(x)
    loss = F.cross_entropy(logits, y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    with torch.no_grad():
        confidence = F.softmax(logits, dim=1).max(dim=1).values.mean()
    return loss.item(), confidence.item()
