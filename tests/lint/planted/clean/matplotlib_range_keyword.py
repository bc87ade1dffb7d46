import matplotlib.pyplot as plt
import torch

values = torch.randn(1000)
plt.hist(values.numpy(), bins=50, range=(-1, 1))
plt.savefig("hist.png")
