import torch
import torch.nn.functional as F

def distill(student, teacher, loader, opt, T=4.0):
    teacher.eval()
    student.train()
    for x, y in loader:
        with torch.no_grad():
            t = teacher(x)
        s = student(x)
        kd = F.kl_div(
            F.log_softmax(s / T, dim=1), F.softmax(t / T, dim=1), reduction="batchmean"
        ) * T * T
        loss = kd + F.cross_entropy(s, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
