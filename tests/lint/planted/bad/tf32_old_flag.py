# planted: line 6, backends.cuda.matmul.allow_tf32 is deprecated; use fp32_precision; since torch 2.9
import torch


def speed_up():
    torch.backends.cuda.matmul.allow_tf32 = True


if __name__ == "__main__":
    speed_up()
    a = torch.randn(512, 512, device="cuda")
    print((a @ a).norm().item())
