import torch

if torch.cuda.is_available():
    print("CUDA is there")
torch.set_default_tensor_type("torch.cuda.FloatTensor")  # here: FLB209
