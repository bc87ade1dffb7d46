"""A small student learns from a large teacher that is never trained here."""

import torch
import torch.nn.functional as F
from torch import nn

TEMPERATURE = 3.0


def mlp(width):
    return nn.Sequential(nn.Linear(20, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 6))


def batch(centers):
    y = torch.randint(6, (64,))
    return centers[y] + 0.8 * torch.randn(64, 20), y


def train_teacher(centers):
    teacher = mlp(128)
    optimizer = torch.optim.Adam(teacher.parameters(), lr=3e-3)
    for _ in range(100):
        x, y = batch(centers)
        optimizer.zero_grad()
        F.cross_entropy(teacher(x), y).backward()
        optimizer.step()
    return teacher.eval().requires_grad_(False)


def distill(student, teacher, centers, steps=120):
    optimizer = torch.optim.Adam(student.parameters(), lr=5e-3)
    student.train()
    for step in range(steps):
        x, y = batch(centers)
        with torch.no_grad():
            soft = F.softmax(teacher(x) / TEMPERATURE, dim=1)
        logits = student(x)
        matching = F.kl_div(F.log_softmax(logits / TEMPERATURE, dim=1), soft, reduction="batchmean")
        loss = 0.7 * TEMPERATURE**2 * matching + 0.3 * F.cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    torch.manual_seed(0)
    centers = torch.randn(6, 20)
    distill(mlp(16), train_teacher(centers), centers)
