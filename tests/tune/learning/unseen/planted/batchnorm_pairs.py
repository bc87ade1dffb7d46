import torch
from torch import nn


class ContextBlock(nn.Module):
    """Global context, as in many segmentation heads: pool to one pixel, then a 1x1 block."""

    def __init__(self, channels):
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.project = nn.Sequential(
            nn.Conv2d(channels, channels, 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()
        )

    def forward(self, x):
        return x + self.project(self.pool(x))


class SegNet(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU())
        self.context = ContextBlock(12)
        self.out = nn.Conv2d(12, classes, 1)

    def forward(self, x):
        return self.out(self.context(self.stem(x)))


def scene():
    image = torch.randn(1, 16, 16) * 0.3
    mask = torch.zeros(16, 16, dtype=torch.long)
    r, c = torch.randint(2, 10, (2,)).tolist()
    mask[r : r + 5, c : c + 5] = 1
    image[0][mask == 1] += 1.5
    return image, mask


def main(batch_size=2, steps=80):
    torch.manual_seed(0)
    model = SegNet(2)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(steps):
        images, masks = zip(*(scene() for _ in range(batch_size)))
        logits = model(torch.stack(images))
        loss = nn.functional.cross_entropy(logits, torch.stack(masks))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")


main()
