import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, random_split


class RandomShift:
    def __init__(self, pixels):
        self.pixels = pixels

    def __call__(self, image):
        dx, dy = torch.randint(-self.pixels, self.pixels + 1, (2,)).tolist()
        image = torch.roll(image, (dy, dx), (1, 2))
        return image + 0.05 * torch.randn_like(image)


class Letters(Dataset):
    def __init__(self, n, transform=None):
        g = torch.Generator().manual_seed(1)
        shapes = (torch.rand(5, 1, 12, 12, generator=g) > 0.6).float()
        self.labels = torch.randint(5, (n,), generator=g)
        self.images = shapes[self.labels] + 0.2 * torch.randn(n, 1, 12, 12, generator=g)
        self.transform = transform

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        image = self.images[i]
        if self.transform:
            image = self.transform(image)
        return image, self.labels[i]


def evaluate(model, loader):
    model.eval()
    right = 0
    with torch.no_grad():
        for image, label in loader:
            right += (model(image).argmax(1) == label).sum().item()
    model.train()
    return right / len(loader.dataset)


torch.manual_seed(0)
everything = Letters(500, transform=RandomShift(2))
train_set, val_set = random_split(everything, [400, 100])
train_loader = DataLoader(train_set, batch_size=40, shuffle=True)
val_loader = DataLoader(val_set, batch_size=50)
model = nn.Sequential(
    nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 5)
)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
step = 0
for epoch in range(7):
    for image, label in train_loader:
        loss = nn.functional.cross_entropy(model(image), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")
        step += 1
    print(f"epoch {epoch} accuracy {evaluate(model, val_loader):.3f}")
