import torch

print("GPU:", torch.cuda.get_device_name(0))  # here: left, what the machine has is not in the file
