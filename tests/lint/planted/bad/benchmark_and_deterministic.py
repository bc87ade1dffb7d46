# planted: line 12, cudnn.benchmark=True beside deterministic=True; in all versions
import random

import numpy as np
import torch
import torch.backends.cudnn as cudnn

random.seed(1)
np.random.seed(1)
torch.manual_seed(1)
cudnn.deterministic = True
cudnn.benchmark = True

print(torch.rand(2))
