import torch


def train(net, loss_fn, opt, loader, use_amp):
    scaler = torch.cuda.amp.GradScaler(enabled=use_amp)  # here: FLB2121
    for x, y in loader:
        with torch.cuda.amp.autocast(enabled=use_amp):  # here: FLB2120
            loss = loss_fn(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
