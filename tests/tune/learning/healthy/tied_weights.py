"""A language model whose output layer shares the weight of its embedding."""

import torch
from torch import nn

VOCABULARY = 24


class TiedModel(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.output = nn.Linear(width, VOCABULARY, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.output.weight = self.embedding.weight

    def forward(self, tokens):
        hidden, _ = self.gru(self.embedding(tokens))
        return self.output(hidden)


def sentences(following, num=32, length=12):
    tokens = [torch.randint(VOCABULARY, (num,))]
    while len(tokens) < length:
        jump = torch.rand(num) < 0.1
        tokens.append(torch.where(jump, torch.randint(VOCABULARY, (num,)), following[tokens[-1]]))
    return torch.stack(tokens, 1)


def main():
    torch.manual_seed(0)
    following = torch.randperm(VOCABULARY)
    model = TiedModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(120):
        tokens = sentences(following)
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(
            logits.reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1)
        )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")


main()
