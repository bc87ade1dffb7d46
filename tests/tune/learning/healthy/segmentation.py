"""Segment bright disks; a border of one pixel is not labelled and does not count."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

IGNORE = 255


class Disks(Dataset):
    def __init__(self, num, size=24):
        self.num = num
        self.size = size

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        center = 4 + (self.size - 8) * torch.rand(2, generator=generator)
        radius = 3 + 3 * torch.rand(1, generator=generator)
        grid = torch.stack(torch.meshgrid(*[torch.arange(self.size)] * 2, indexing="ij"))
        distance = (grid - center[:, None, None]).norm(dim=0)
        mask = (distance < radius).long()
        image = mask + 0.6 * torch.randn(self.size, self.size, generator=generator)
        mask[(distance - radius).abs() < 0.5] = IGNORE
        return image[None], mask


class SmallUNet(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.ReLU())
        self.down2 = nn.Sequential(nn.Conv2d(width, 2 * width, 3, 2, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.out = nn.Conv2d(2 * width, 2, 3, padding=1)

    def forward(self, x):
        fine = self.down1(x)
        coarse = self.up(self.down2(fine))
        return self.out(torch.cat([fine, coarse], 1))


torch.manual_seed(0)
loader = DataLoader(Disks(640), batch_size=8, shuffle=True)
model = SmallUNet()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
criterion = nn.CrossEntropyLoss(ignore_index=IGNORE)
for step, (images, masks) in enumerate(loader):
    loss = criterion(model(images), masks)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
