"""A small GPT whose head shares the weights of the embedding."""

import math
import random

import torch
import torch.nn.functional as F
from torch import nn


class GPT(nn.Module):
    def __init__(self, vocabulary, context=20, d=48, depth=2):
        super().__init__()
        self.wte = nn.Embedding(vocabulary, d)
        self.wpe = nn.Embedding(context, d)
        self.blocks = nn.ModuleList(Block(d, 4) for _ in range(depth))
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, vocabulary, bias=False)
        self.apply(self.init)
        self.head.weight = self.wte.weight

    def init(self, m):
        if isinstance(m, (nn.Linear, nn.Embedding)):
            nn.init.normal_(m.weight, std=0.02)

    def forward(self, ids, targets=None):
        h = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.norm(h))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))


class Block(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.ln1 = nn.LayerNorm(d)
        self.qkv = nn.Linear(d, 3 * d)
        self.proj = nn.Linear(d, d)
        self.ln2 = nn.LayerNorm(d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))
        nn.init.normal_(self.proj.weight, std=0.02 / math.sqrt(4))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.ln2(x))


rng = random.Random(0)
text = "".join(rng.choice(["abc ", "bad ", "cab ", "deaf "]) for _ in range(2000))
chars = sorted(set(text))
data = torch.tensor([chars.index(c) for c in text])
torch.manual_seed(0)
gpt = GPT(len(chars))
optimizer = torch.optim.AdamW(gpt.parameters(), lr=3e-3, betas=(0.9, 0.95))
for step in range(80):
    at = torch.randint(len(data) - 21, (16,))
    x = torch.stack([data[i : i + 20] for i in at])
    y = torch.stack([data[i + 1 : i + 21] for i in at])
    _, loss = gpt(x, y)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
    optimizer.step()
    print(f"step {step} loss {loss.item():.4f}")
