# planted: line 5, torch.utils.ffi was removed; use torch.utils.cpp_extension; since torch 1.0
import os

import torch
from torch.utils.ffi import create_extension

this_file = os.path.dirname(os.path.realpath(__file__))
sources = ["src/nms.c"]
headers = ["src/nms.h"]

ffi = create_extension(
    "_ext.nms",
    headers=headers,
    sources=sources,
    relative_to=__file__,
    with_cuda=False,
)

if __name__ == "__main__":
    ffi.build()
