# planted: line 8, a layer replaced after the optimizer was built is not trained; in all versions
import torch
import torch.nn as nn
from torchvision.models import resnet18

model = resnet18()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model.fc = nn.Linear(512, 5)

criterion = nn.CrossEntropyLoss()
for x, y in [(torch.randn(2, 3, 64, 64), torch.tensor([0, 1]))]:
    optimizer.zero_grad()
    criterion(model(x), y).backward()
    optimizer.step()
