import timm
import torch
from timm.layers import DropPath
from timm.data import create_transform, resolve_data_config

model = timm.create_model("resnet50.a1_in1k", pretrained=True, num_classes=10)
config = resolve_data_config({}, model=model)
train_tf = create_transform(**config, is_training=True)
drop = DropPath(0.1)
print(drop(torch.randn(2, 3)).shape, train_tf)
