import torch

torch.cuda.reset_max_memory_allocated()  # here: FLB288
print(torch.cuda.max_memory_allocated())
