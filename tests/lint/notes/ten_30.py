import torch

images = torch.randn(32, 3, 56, 56, names=("N", "C", "H", "W"))  # here: FLB197
total = images.sum("C")
channel = images.select("C", index=0)
aligned = images.align_to("N", "H", "W", "C")
