# planted: line 7, torch.backends.cuda.sdp_kernel is deprecated; use torch.nn.attention.sdpa_kernel; since torch 2.3
import torch
import torch.nn.functional as F


def attention(q, k, v):
    with torch.backends.cuda.sdp_kernel(enable_flash=True, enable_math=False):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


q = torch.randn(1, 8, 128, 64, device="cuda", dtype=torch.float16)
print(attention(q, q, q).shape)
