# planted: line 7, size_average= is deprecated; use reduction=; since torch 0.4.1
import torch
import torch.nn as nn

D_in, H, D_out = 1000, 100, 10
model = nn.Sequential(nn.Linear(D_in, H), nn.ReLU(), nn.Linear(H, D_out))
loss_fn = nn.MSELoss(size_average=False)

x = torch.randn(64, D_in)
y = torch.randn(64, D_out)
for t in range(500):
    loss = loss_fn(model(x), y)
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for param in model.parameters():
            param -= 1e-4 * param.grad
