"""A frozen teacher in eval mode; softened targets times T squared, plus labels."""

import torch
import torch.nn.functional as F
from torch import nn


class TinyConv(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.c1 = nn.Conv2d(1, width, 3)
        self.bn = nn.BatchNorm2d(width)
        self.c2 = nn.Conv2d(width, 2 * width, 3)
        self.fc = nn.Linear(2 * width, 4)

    def forward(self, x):
        x = F.relu(self.bn(self.c1(x)))
        return self.fc(F.relu(self.c2(x)).mean((2, 3)))


def lines(n):
    y = torch.randint(4, (n,))
    x = 0.5 * torch.randn(n, 1, 10, 10)
    eye = torch.eye(10)
    for image, label in zip(x[:, 0], y):
        if label == 0:
            image[5] += 2
        elif label == 1:
            image[:, 5] += 2
        else:
            image += 2 * (eye if label == 2 else eye.flip(0))
    return x, y


def train_teacher():
    teacher = TinyConv(24)
    optimizer = torch.optim.Adam(teacher.parameters(), lr=1e-2)
    for _ in range(15):
        x, y = lines(64)
        optimizer.zero_grad()
        F.cross_entropy(teacher(x), y).backward()
        optimizer.step()
    return teacher.eval().requires_grad_(False)


class Distiller:
    def __init__(self, teacher, student, temperature=4.0, alpha=0.7):
        self.teacher = teacher
        self.student = student
        self.t = temperature
        self.alpha = alpha

    def loss(self, x, y):
        logits = self.student(x)
        with torch.no_grad():
            wanted = F.log_softmax(self.teacher(x) / self.t, dim=1)
        soft = F.kl_div(
            F.log_softmax(logits / self.t, dim=1), wanted, reduction="batchmean", log_target=True
        )
        return self.alpha * self.t**2 * soft + (1 - self.alpha) * F.cross_entropy(logits, y)


torch.manual_seed(0)
student = TinyConv(6)
distiller = Distiller(train_teacher(), student)
optimizer = torch.optim.Adam(student.parameters(), lr=5e-3)
for step in range(80):
    loss = distiller.loss(*lines(32))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.4f}")
