# planted: line 13, state_dict of a DataParallel model saved with its module. prefix; in all versions
import torch
import torch.nn as nn


def save_checkpoint(model, epoch, path):
    torch.save({"epoch": epoch, "state_dict": model.state_dict()}, path)


net = nn.DataParallel(nn.Linear(4, 2)).cuda()
for epoch in range(3):
    net(torch.randn(8, 4).cuda()).sum().backward()
torch.save(net.state_dict(), "net.pth")
