import torch
from torch.autograd import Variable  # here: FLB2111

tensor = torch.ones(2)
variable = Variable(tensor)  # here: FLB2110
array = variable.data.cpu().numpy()  # here: FLB2161
