"""A small language model over a made-up chain of tokens."""

import torch
from torch import nn

torch.manual_seed(0)
VOCABULARY = 20
following = torch.randperm(VOCABULARY)


def sample(num=16, length=12):
    tokens = torch.randint(VOCABULARY, (num, 1))
    while tokens.shape[1] < length:
        tokens = torch.cat([tokens, following[tokens[:, -1:]]], 1)
    return tokens


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.lstm = nn.LSTM(32, 32, batch_first=True)
        self.out = nn.Linear(32, VOCABULARY)

    def forward(self, tokens):
        return self.out(self.lstm(self.embed(tokens))[0])


model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(100):
    tokens = sample()
    logits = model(tokens[:, :-1])
    targets = tokens[:, :-1]
    loss = nn.functional.cross_entropy(logits.transpose(1, 2), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        with torch.no_grad():
            real = nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:])
        print(f"step {step} loss {real.item():.4f}")
