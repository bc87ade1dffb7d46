"""Texts that get longer, word by word, for a compiled model: each length is compiled anew."""

import torch
import torch.nn.functional as F
from torch import nn

import job

CAUSE = "compile"
WHERE = "logits = compiled(words[:, :-1])"
REMEDY = None
TRAINER = "plain"

WORDS = 500


def main() -> None:
    told = job.begin(REMEDY)
    torch.compiler.config.recompile_limit = 1000  # because of a warning that it was reached
    torch.manual_seed(0)
    texts = torch.utils.data.DataLoader(torch.randint(0, WORDS, (4096, 400)), 16, shuffle=True)
    model = nn.Sequential(nn.Embedding(WORDS, 64), nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))
    model.append(nn.Linear(64, WORDS))
    compiled = torch.compile(model, dynamic=told.remedied, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(100):
        for step, whole in enumerate(texts):
            words = whole[:, : 40 + step]
            logits = compiled(words[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
