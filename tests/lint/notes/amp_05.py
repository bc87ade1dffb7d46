import torch


def train(net, loss_fn, opt, loader):
    scaler = torch.cuda.amp.GradScaler()  # here: FLB2121
    for x, y in loader:
        with torch.cuda.amp.autocast():  # here: FLB2120
            loss = loss_fn(net(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
