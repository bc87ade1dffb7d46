"""Segment images into three kinds of ground."""

import torch
import torch.nn.functional as F
from torch import nn

NUM_CLASSES = 3


def scenes(num=8, size=16):
    masks = torch.randint(NUM_CLASSES, (num, 4, 4))
    masks = masks.repeat_interleave(size // 4, 1).repeat_interleave(size // 4, 2)
    images = F.one_hot(masks, NUM_CLASSES).permute(0, 3, 1, 2).float()
    return images + 0.7 * torch.randn(images.shape), masks


class Segmenter(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, NUM_CLASSES, 3, padding=1)

    def forward(self, x):
        return self.conv2(torch.relu(self.conv1(x)))


def train(steps=80):
    model = Segmenter()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(steps):
        images, masks = scenes()
        logits = model(images)
        flat = logits.reshape(-1, NUM_CLASSES)
        loss = F.cross_entropy(flat, masks.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")


torch.manual_seed(0)
train()
