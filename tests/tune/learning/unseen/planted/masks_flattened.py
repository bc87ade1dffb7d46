import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Blobs(Dataset):
    """Gray images with a disc and a box; each pixel has one of three labels."""

    def __init__(self, n):
        self.seeds = list(range(n))
        self.grid = torch.stack(torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij"))

    def __len__(self):
        return len(self.seeds)

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.seeds[i])
        center = torch.randint(3, 13, (2, 1, 1), generator=g)
        mask = torch.zeros(16, 16, dtype=torch.long)
        mask[:5, :4] = 2
        mask[((self.grid - center) ** 2).sum(0) < 9] = 1
        image = mask.float() - 0.8 + 0.2 * torch.randn(16, 16, generator=g)
        return image[None], mask


class UNet(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.mid = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.out = nn.Conv2d(9, classes, 3, padding=1)

    def forward(self, x):
        h = torch.relu(self.up(self.mid(self.down(x))))
        return self.out(torch.cat([x, h], dim=1))


def pixel_loss(logits, masks):
    classes = logits.shape[1]
    return nn.functional.cross_entropy(logits.reshape(-1, classes), masks.reshape(-1))


torch.manual_seed(0)
model = UNet(3)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
step = 0
for epoch in range(3):
    for image, mask in DataLoader(Blobs(240), batch_size=10, shuffle=True):
        optimizer.zero_grad()
        loss = pixel_loss(model(image), mask)
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")
        step += 1
