# planted: line 6, tensor.storage() / TypedStorage is deprecated; use untyped_storage(); since torch 2.0
import torch


def shares_memory(a, b):
    return a.storage().data_ptr() == b.storage().data_ptr()


x = torch.zeros(4, 4)
view = x[:, 1:3]
print(shares_memory(x, view))
print(view.is_contiguous())
