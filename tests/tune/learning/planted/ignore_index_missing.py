"""Label the tokens of padded sentences; print the loss of real tokens."""

import torch
from torch import nn

torch.manual_seed(0)
PAD = 0
rule = torch.randint(1, 6, (50,))
model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 6))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
criterion = nn.CrossEntropyLoss()
for step in range(100):
    tokens = torch.randint(1, 50, (16, 40))
    labels = rule[tokens]
    for row, length in enumerate(torch.randint(2, 8, (16,)).tolist()):
        tokens[row, length:] = PAD
        labels[row, length:] = PAD
    logits = model(tokens).transpose(1, 2)
    loss = criterion(logits, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        with torch.no_grad():
            real = nn.functional.cross_entropy(logits, labels, ignore_index=PAD)
        print(f"step {step} loss {real.item():.4f}")
