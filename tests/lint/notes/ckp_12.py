import torch

net = torch.nn.Linear(2, 2)
torch.save(net, "net.pth")  # here: FLB507
net = torch.load("net.pth")
net.eval()
