from torch.cuda.amp import autocast  # here: FLB2120


def forward(net, x, use_amp):
    with autocast(enabled=use_amp):
        return net(x)
