"""A ResNet of torchvision on small images, its residual branches beginning at zero."""

import torch
import torchvision
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2


class Textures(Dataset):
    def __init__(self, num, transform):
        self.num = num
        self.transform = transform

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        label = index % 3
        image = torch.randint(60, 190, (3, 32, 32), generator=generator, dtype=torch.uint8)
        image[label, :: label + 2] += 60
        return self.transform(image), label


torch.manual_seed(0)
transform = v2.Compose(
    [
        v2.RandomHorizontalFlip(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize([0.5, 0.5, 0.5], [0.25, 0.25, 0.25]),
    ]
)
loader = DataLoader(Textures(16 * 64, transform), batch_size=16, shuffle=True)
model = torchvision.models.ResNet(
    torchvision.models.resnet.BasicBlock, [1, 1, 1, 1], 3, zero_init_residual=True
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9, weight_decay=1e-4)
criterion = nn.CrossEntropyLoss()

model.train()
for step, (images, labels) in enumerate(loader):
    optimizer.zero_grad()
    loss = criterion(model(images), labels)
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
