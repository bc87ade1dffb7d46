"""The state of an LSTM is carried on and detached between pieces of one long text."""

import torch
from torch import nn


class WordModel(nn.Module):
    def __init__(self, vocabulary, d=32):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, d)
        self.lstm = nn.LSTM(d, d, num_layers=2, dropout=0.1)
        self.out = nn.Linear(d, vocabulary)

    def forward(self, ids, state):
        h, state = self.lstm(self.embed(ids), state)
        return self.out(h), state

    def initial(self, batch):
        return tuple(torch.zeros(2, batch, 32) for _ in range(2))


def repackage(state):
    return tuple(s.detach() for s in state)


def corpus(n, vocabulary=12):
    """A walk: the next word is mostly the last plus a stride that changes slowly."""
    out = [0]
    stride = 1
    for i in range(n):
        if i % 37 == 0:
            stride = 1 + torch.randint(3, ()).item()
        jump = stride if torch.rand(()) < 0.9 else torch.randint(vocabulary, ()).item()
        out.append((out[-1] + jump) % vocabulary)
    return torch.tensor(out)


def batchify(data, columns):
    rows = len(data) // columns
    return data[: rows * columns].view(columns, rows).t().contiguous()


def main(bptt=12):
    torch.manual_seed(0)
    data = batchify(corpus(9000), 10)
    model = WordModel(12)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    state = model.initial(10)
    for step, at in enumerate(range(0, len(data) - 1 - bptt, bptt)):
        state = repackage(state)
        logits, state = model(data[at : at + bptt], state)
        target = data[at + 1 : at + 1 + bptt]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")


main()
