"""SGD for the matrices, AdamW for the rest: each parameter is in exactly one optimizer."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(
    nn.Embedding(30, 16),
    nn.Flatten(),
    nn.Linear(64, 64),
    nn.LayerNorm(64),
    nn.ReLU(),
    nn.Linear(64, 5),
)
matrices = [m.weight for m in model if isinstance(m, nn.Linear)]
known = {id(p) for p in matrices}
others = [p for p in model.parameters() if id(p) not in known]
optimizers = [
    torch.optim.SGD(matrices, lr=0.05, momentum=0.9, nesterov=True),
    torch.optim.AdamW(others, lr=5e-3, weight_decay=0.0),
]
schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=120) for o in optimizers]

value = torch.randn(30)
for step in range(120):
    tokens = torch.randint(30, (64, 4))
    y = torch.bucketize(value[tokens].sum(1), torch.tensor([-2.0, -0.7, 0.7, 2.0]))
    loss = nn.functional.cross_entropy(model(tokens), y)
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    for scheduler in schedulers:
        scheduler.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
