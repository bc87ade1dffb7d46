"""Gradient checkpointing and bfloat16: each block runs twice per step."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.attend = nn.MultiheadAttention(d, 4, dropout=0.1, batch_first=True)
        self.n1 = nn.LayerNorm(d)
        self.n2 = nn.LayerNorm(d)
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * d, d))

    def forward(self, x):
        h = self.n1(x)
        x = x + self.attend(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.n2(x))


class PatchTransformer(nn.Module):
    def __init__(self, d=32, classes=3):
        super().__init__()
        self.patch = nn.Conv2d(1, d, 4, stride=4)
        self.cls = nn.Parameter(torch.zeros(1, 1, d))
        self.place = nn.Parameter(torch.zeros(1, 17, d))
        self.blocks = nn.ModuleList(Block(d) for _ in range(3))
        self.head = nn.Linear(d, classes)
        nn.init.trunc_normal_(self.place, std=0.02)

    def forward(self, x):
        h = self.patch(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.cls.expand(len(h), -1, -1), h], 1) + self.place
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False)
        return self.head(h[:, 0])


def images(n):
    y = torch.randint(3, (n,))
    x = 0.4 * torch.randn(n, 1, 16, 16)
    for image, label in zip(x[:, 0], y):
        k = int(torch.randint(4, ())) * 4
        if label == 0:
            image[k : k + 4] += 1
        elif label == 1:
            image[:, k : k + 4] += 1
        else:
            image[k : k + 4, k : k + 4] += 2
    return x, y


torch.manual_seed(0)
model = PatchTransformer()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
for step in range(70):
    x, y = images(24)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(x)
    loss = nn.functional.cross_entropy(logits.float(), y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(f"step {step} loss {loss.item():.4f}")
