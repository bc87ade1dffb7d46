# planted: line 13, zero_grad between backward() and step(): the step does nothing; in all versions
import torch
import torch.nn as nn

model = nn.Linear(3, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)

for i in range(100):
    x = torch.randn(8, 3)
    y = x.sum(dim=1, keepdim=True)
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    opt.zero_grad()
    opt.step()
