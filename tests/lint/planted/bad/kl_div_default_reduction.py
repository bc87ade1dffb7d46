# planted: line 7, F.kl_div with the default reduction 'mean' is not the KL divergence; use 'batchmean'; since torch 1.0
import torch
import torch.nn.functional as F


def kd_loss(student, teacher, labels, T=2.0, alpha=0.5):
    soft = F.kl_div(
        F.log_softmax(student / T, dim=1),
        F.softmax(teacher / T, dim=1),
    )
    hard = F.cross_entropy(student, labels)
    return alpha * soft * T * T + (1 - alpha) * hard
