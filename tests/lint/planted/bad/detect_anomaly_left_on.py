# planted: line 5, torch.autograd.set_detect_anomaly(True) left on in training: slow; in all versions
import torch
import torch.nn as nn

torch.autograd.set_detect_anomaly(True)

model = nn.LSTM(16, 32, batch_first=True)
optimizer = torch.optim.Adam(model.parameters())

for step in range(1000):
    out, _ = model(torch.randn(4, 20, 16))
    loss = out.pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
