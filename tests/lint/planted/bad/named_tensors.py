# planted: line 4, named tensors were removed; since torch 2.13
import torch

imgs = torch.randn(8, 3, 32, 32, names=("N", "C", "H", "W"))
mean = imgs.mean()
std = imgs.std()
normalised = (imgs - mean) / std
print(normalised.shape)

total = normalised.sum()
print(float(total))
