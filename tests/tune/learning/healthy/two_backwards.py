"""Two losses over one trunk, each with its own backward: the gradients are to add up."""

import torch
from torch import nn

torch.manual_seed(0)
trunk = nn.Sequential(nn.Linear(14, 48), nn.ReLU())
classify = nn.Linear(48, 4)
regress = nn.Linear(48, 1)
network = nn.ModuleList([trunk, classify, regress])
optimizer = torch.optim.Adam(network.parameters(), lr=5e-3)
rule = torch.randn(14, 4)
slope = torch.randn(14, 1)

for step in range(100):
    x = torch.randn(64, 14)
    features = trunk(x)
    class_loss = nn.functional.cross_entropy(classify(features), (x @ rule).argmax(1))
    value_loss = 0.1 * nn.functional.mse_loss(regress(features), x @ slope)
    optimizer.zero_grad()
    class_loss.backward(retain_graph=True)  # the trunk's graph is needed once more
    value_loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {class_loss.item() + value_loss.item():.4f}")
