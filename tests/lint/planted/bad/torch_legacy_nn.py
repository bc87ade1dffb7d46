# planted: line 3, torch.legacy was removed; since torch 1.0
import torch
import torch.legacy.nn as lnn

from convert_torch import copy_param

model = lnn.Sequential()
model.add(lnn.SpatialConvolution(3, 64, 3, 3))
model.add(lnn.ReLU())
copy_param(model, "vgg.t7")
