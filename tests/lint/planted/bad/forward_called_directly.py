# planted: line 11, model.forward(x) skips hooks (and DDP); call model(x); in all versions
import torch
import torch.nn as nn

model = nn.Sequential(nn.Linear(10, 10), nn.ReLU())
model.eval()


@torch.no_grad()
def predict(batch):
    logits = model.forward(batch)
    return logits.argmax(dim=1)


print(predict(torch.randn(2, 10)))
