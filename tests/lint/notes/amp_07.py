import torch

x = torch.ones(1, device="cuda", requires_grad=True)
z = torch.ones(1, device="cuda", requires_grad=True)
opt = torch.optim.SGD([x, z], lr=0.001)
scaler = torch.cuda.amp.GradScaler()  # here: FLB2121
scaler.scale((x + z).sum()).backward()
scaler.unscale_(opt)
torch.nn.utils.clip_grad_norm_(x, 0.7)  # here: left, a limit for each tensor can be meant
torch.nn.utils.clip_grad_norm_(z, 0.7)
scaler.step(opt)
scaler.update()
