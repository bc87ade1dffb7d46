import argparse

import torch
import torch.nn.functional as F
from torch import nn


def mlp(width):
    return nn.Sequential(nn.Linear(12, width), nn.ReLU(), nn.Linear(width, 5))


def data(n):
    centers = torch.randn(5, 12) * 2
    labels = torch.randint(5, (n,))
    return centers[labels] + torch.randn(n, 12), labels


def pretrain(teacher, x, y):
    optimizer = torch.optim.Adam(teacher.parameters(), lr=5e-3)
    for _ in range(3):
        for bx, by in zip(x.split(128), y.split(128)):
            optimizer.zero_grad()
            F.cross_entropy(teacher(bx), by).backward()
            optimizer.step()
    teacher.eval()
    for p in teacher.parameters():
        p.requires_grad_(False)


def soft_loss(student_logits, teacher_logits, temperature):
    s = F.softmax(student_logits / temperature, dim=1)
    t = F.softmax(teacher_logits / temperature, dim=1)
    return F.kl_div(s, t, reduction="batchmean") * temperature**2


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--temperature", type=float, default=3.0)
    parser.add_argument("--steps", type=int, default=90)
    args = parser.parse_args()
    torch.manual_seed(0)
    x, y = data(2048)
    teacher = mlp(128)
    pretrain(teacher, x[:512], y[:512])
    student = mlp(16)
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    for step in range(args.steps):
        batch = x[torch.randint(len(x), (64,))]
        loss = soft_loss(student(batch), teacher(batch), args.temperature)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print("step", step, "loss", round(loss.item(), 4))


main()
