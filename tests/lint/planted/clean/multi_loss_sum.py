import torch
import torch.nn.functional as F


def train_step(model, optimizer, batch, weights=(1.0, 0.5)):
    outputs = model(batch["image"])
    total_loss = 0
    for weight, out in zip(weights, outputs, strict=True):
        loss = F.cross_entropy(out, batch["label"])
        total_loss += weight * loss
    optimizer.zero_grad()
    total_loss.backward()
    optimizer.step()
    return total_loss.item()
