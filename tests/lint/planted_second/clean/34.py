import torch
import torch.nn as nn

model = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 1))
criterion = nn.MSELoss()
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5)
x, y = torch.randn(64, 13), torch.randn(64)

def closure():
    optimizer.zero_grad()
    loss = criterion(model(x).squeeze(1), y)
    loss.backward()
    return loss

for _ in range(20):
    optimizer.step(closure)
