import torch
from torch import nn
from torch.amp import GradScaler, autocast


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.mid = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(4, 16)
        self.fc = nn.Linear(16, 4)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        x = torch.relu(self.norm(self.mid(x)))
        return self.fc(x.mean((2, 3)))


def corners(n):
    """A bright square in one of four corners."""
    images = 0.3 * torch.randn(n, 1, 16, 16)
    labels = torch.randint(4, (n,))
    for image, label in zip(images, labels):
        row, col = divmod(label.item(), 2)
        image[0, row * 8 + 2 : row * 8 + 6, col * 8 + 2 : col * 8 + 6 + row * 2] += 1.0 + row + col
    return images, labels


class AmpLoop:
    def __init__(self, model, max_norm=1.0):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.scaler = GradScaler("cpu", init_scale=65536.0)
        self.max_norm = max_norm

    def step(self, x, y):
        self.optimizer.zero_grad()
        with autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(self.model(x), y)
        self.scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item()


torch.manual_seed(0)
images, labels = corners(512)
loop = AmpLoop(ConvNet())
for step in range(70):
    chosen = torch.randint(len(images), (32,))
    print(f"step {step} loss {loop.step(images[chosen], labels[chosen]):.4f}")
