# planted: line 10, optimizer group key 'parameters' instead of 'params'; in all versions
import torch
import torchvision

model = torchvision.models.resnet18()
fc_ids = set(map(id, model.fc.parameters()))
conv_params = [p for p in model.parameters() if id(p) not in fc_ids]
optimizer = torch.optim.SGD(
    [
        {"parameters": conv_params, "lr": 1e-3},
        {"params": model.fc.parameters()},
    ],
    lr=1e-2,
    momentum=0.9,
)
