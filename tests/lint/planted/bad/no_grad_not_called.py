# planted: line 9, torch.no_grad without parentheses in a with statement; in all versions
import torch
import torchvision

model = torchvision.models.resnet18()
model.eval()
image = torch.randn(1, 3, 224, 224)

with torch.no_grad:
    scores = model(image)

print(scores.argmax(1).item())
