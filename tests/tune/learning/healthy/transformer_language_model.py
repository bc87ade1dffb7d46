"""A small causal transformer on a made-up chain of letters."""

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 16
CONTEXT = 24


class Block(nn.Module):
    def __init__(self, width, num_heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, num_heads, batch_first=True)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x, mask):
        h = self.norm1(x)
        x = x + self.attention(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    def __init__(self, width=32, depth=2):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList([Block(width, 4) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens):
        length = tokens.shape[1]
        mask = torch.triu(torch.ones(length, length, dtype=torch.bool), diagonal=1)
        x = self.token(tokens) + self.position(torch.arange(length))
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def get_batch(table, num=32):
    tokens = torch.randint(VOCABULARY, (num, CONTEXT + 1))
    for t in range(1, CONTEXT + 1):
        tokens[:, t] = torch.multinomial(table[tokens[:, t - 1]], 1)[:, 0]
    return tokens[:, :-1], tokens[:, 1:]


torch.manual_seed(0)
table = torch.softmax(3 * torch.randn(VOCABULARY, VOCABULARY), 1)
model = LanguageModel()
decayed = [p for p in model.parameters() if p.ndim >= 2]
others = [p for p in model.parameters() if p.ndim < 2]
optimizer = torch.optim.AdamW(
    [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=3e-3
)
for step in range(120):
    inputs, targets = get_batch(table)
    logits = model(inputs)
    loss = F.cross_entropy(logits.view(-1, VOCABULARY), targets.reshape(-1))
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
