import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Stripes(Dataset):
    def __init__(self, n):
        g = torch.Generator().manual_seed(5)
        self.label = torch.randint(2, (n,), generator=g)
        self.noise = torch.randn(n, 1, 14, 14, generator=g) * 0.5

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        image = self.noise[i].clone()
        if self.label[i]:
            image[:, ::2] += 1
        else:
            image[:, :, ::2] += 1
        return image, self.label[i]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 12, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(12, 24, 3), nn.ReLU()
        )
        self.head_norm = nn.LayerNorm(24)
        self.classifier = nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, x):
        return self.classifier(self.head_norm(self.backbone(x).mean((2, 3))))


def freeze(model, trainable=("head",)):
    """Only the new layers on top are trained at first."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad = any(part in name for part in trainable)


def trainable(model):
    return [p for p in model.parameters() if p.requires_grad]


torch.manual_seed(0)
net = Net()
freeze(net)
optimizer = torch.optim.Adam(trainable(net), lr=1e-3)
step = 0
for epoch in range(3):
    for image, label in DataLoader(Stripes(640), batch_size=32, shuffle=True):
        loss = nn.functional.cross_entropy(net(image), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")
        step += 1
