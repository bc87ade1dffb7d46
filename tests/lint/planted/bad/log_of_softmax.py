# planted: line 8, log(softmax(x)) is unstable; use log_softmax; in all versions
import torch
import torch.nn.functional as F


def distill(student_logits, teacher_logits, T=4.0):
    p = F.softmax(teacher_logits / T, dim=1)
    log_q = torch.log(F.softmax(student_logits / T, dim=1))
    return F.kl_div(log_q, p, reduction="batchmean") * T * T


print(distill(torch.randn(4, 10), torch.randn(4, 10)))
