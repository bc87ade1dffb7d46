# planted: line 9, nn.Softmax as the last layer of a Sequential trained with CrossEntropyLoss; in all versions
import torch
from torch import nn

model = nn.Sequential(
    nn.Linear(20, 64),
    nn.ReLU(),
    nn.Linear(64, 5),
    nn.Softmax(dim=1),
)
loss_fn = nn.CrossEntropyLoss()
opt = torch.optim.SGD(model.parameters(), lr=0.01)

for _ in range(100):
    x = torch.randn(16, 20)
    y = torch.randint(0, 5, (16,))
    opt.zero_grad()
    loss = loss_fn(model(x), y)
    loss.backward()
    opt.step()
