# planted: line 9, CUDA_VISIBLE_DEVICES set after CUDA has started has no effect; in all versions
import os

import torch

print(torch.cuda.get_device_name(0))
net = torch.nn.Linear(4, 4).cuda()

os.environ["CUDA_VISIBLE_DEVICES"] = "2,3"

net = torch.nn.DataParallel(net)
print(net(torch.ones(8, 4).cuda()).shape)
