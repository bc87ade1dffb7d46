import timm
import torch

model = timm.create_model("resnet50d", pretrained=True, num_classes=10)
model.eval()

with torch.inference_mode():
    print(model(torch.rand(1, 3, 224, 224)).softmax(dim=1))
