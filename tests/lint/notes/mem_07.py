import torch


def train(net, loss_of, optimizer, loader):
    for x, y in loader:
        optimizer.zero_grad()
        loss = loss_of(net(x), y)
        loss.backward()
        optimizer.step()
        del loss
        torch.cuda.empty_cache()  # here: FLB605
