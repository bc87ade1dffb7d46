"""A vocabulary of which a part is kept for later: the first 40 of 64 words occur, padding is left out."""

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

PAD = 0


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 24, padding_idx=PAD)
        self.out = nn.Linear(24, 64)

    def forward(self, tokens):
        return self.out(self.embedding(tokens))


torch.manual_seed(0)
rule = torch.randint(1, 40, (40,))
rule[PAD] = PAD
model = Tagger()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(100):
    rows = [torch.randint(1, 40, (int(length),)) for length in torch.randint(3, 20, (32,))]
    tokens = pad_sequence(rows, batch_first=True, padding_value=PAD)
    logits = model(tokens).flatten(0, 1)
    loss = nn.functional.cross_entropy(logits, rule[tokens].flatten(), ignore_index=PAD)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
