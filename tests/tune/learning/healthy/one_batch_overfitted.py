"""The usual first test of a new network: can it learn one batch by heart?"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
images = torch.rand(512, 1, 16, 16)
labels = torch.randint(0, 10, (512,))  # arbitrary: there is nothing to generalize to
loader = DataLoader(TensorDataset(images, labels), batch_size=16, shuffle=True)

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, stride=2, padding=1),
    nn.ReLU(),
    nn.Conv2d(16, 32, 3, stride=2, padding=1),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(32 * 16, 10),
)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
criterion = nn.CrossEntropyLoss()

# The same batch at each step, on purpose.
x, y = next(iter(loader))
for step in range(100):
    logits = model(x)
    loss = criterion(logits, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")

accuracy = (model(x).argmax(1) == y).float().mean().item()
print(f"accuracy on the batch: {accuracy:.2f}")
