# planted: line 6, LambdaLR warm-up epoch / 10 starts with lr 0 for a whole epoch and grows without bound; in all versions
import torch

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda=lambda t: t / 10)

for epoch in range(80):
    for _ in range(10):
        optimizer.zero_grad()
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    warmup.step()
