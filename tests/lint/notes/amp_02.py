import torch

scaler = torch.cuda.amp.GradScaler(enabled=True)  # here: FLB2121
