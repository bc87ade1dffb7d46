# planted: line 3, apex.amp was removed; use torch.amp; since apex 2024/2025
import torch
from apex import amp

model = torch.nn.Linear(16, 4).cuda()
optimizer = torch.optim.Adam(model.parameters())
model, optimizer = amp.initialize(model, optimizer, opt_level="O1")

for _ in range(10):
    loss = model(torch.randn(8, 16).cuda()).pow(2).mean()
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
