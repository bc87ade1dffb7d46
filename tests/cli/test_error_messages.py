"""What torch prints when it refuses, pasted into the search: the row of that message comes first."""

import functools
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate, random_split
from torchvision.transforms.functional import normalize, to_tensor

from flambeau.cli.recipe_search import Index


@functools.cache
def index(*, chinese: bool) -> Index:
    return Index(chinese=chinese)


def ones(*shape: int, **options: Any) -> torch.Tensor:
    return torch.ones(*shape, **options)


def weight() -> torch.Tensor:
    return ones(2, requires_grad=True)


def twice() -> None:
    loss = weight().exp().sum()
    loss.backward()
    loss.backward()


def taken_apart() -> None:
    images, labels = ones(3, 2)
    assert images is not labels


def changed_in_place() -> None:
    grown = weight().exp()
    grown.add_(1)
    grown.sum().backward()


def made_for_inference() -> None:
    with torch.inference_mode():
        images = ones(2)
    (images * weight()).sum().backward()


def not_a_number() -> None:
    with torch.autograd.detect_anomaly():
        (torch.zeros(1, requires_grad=True).sqrt() * 0).sum().backward()


def unscaled_twice() -> None:
    scaler = torch.amp.GradScaler("cpu")
    parameter = weight()
    optimizer = torch.optim.SGD([parameter], 0.1)
    scaler.scale(parameter.sum()).backward()
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)


def no_scaled_loss() -> None:
    torch.amp.GradScaler("cpu").step(torch.optim.SGD([weight()], 0.1))


def other_groups() -> None:
    one = torch.optim.SGD([weight()], 0.1)
    torch.optim.SGD([weight(), weight()], 0.1).load_state_dict(one.state_dict())


def cut_off() -> None:
    file = io.BytesIO()
    torch.save({"weight": ones(1000)}, file)
    torch.load(io.BytesIO(file.getvalue()[:900]))


def other_objects() -> None:
    file = io.BytesIO()
    torch.save(warnings.WarningMessage("", UserWarning, "", 1), file)
    file.seek(0)
    torch.load(file)


def scaled_other_weight() -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(weight().sum()).backward()
    scaler.step(torch.optim.SGD([weight()], 0.1))


def float16_weight() -> None:
    scaler = torch.amp.GradScaler("cpu")
    parameter = ones(2, dtype=torch.float16, requires_grad=True)
    scaler.scale(parameter.float().sum()).backward()
    scaler.unscale_(torch.optim.SGD([parameter], 0.1))


def in_two_groups() -> None:
    shared = [weight()]
    torch.optim.SGD([{"params": shared}, {"params": shared}], 0.1)


def weights_alone() -> None:
    nn.Linear(1, 1).state_dict().eval()  # type: ignore[attr-defined]


class Fails(Dataset[int]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        raise ValueError(index)


def begun_twice() -> None:
    for _ in range(2):
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)


@pytest.fixture(autouse=True)
def no_process_group() -> Iterator[None]:
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class NoInit(nn.Module):
    def __init__(self) -> None:
        self.layer = nn.Linear(1, 1)


MESSAGES: dict[str, Callable[[], object]] = {
    "mat1 and mat2 shapes cannot be multiplied": lambda: nn.Linear(256, 10)(ones(64, 512)),
    "mat1 and mat2 must have the same dtype": lambda: nn.Linear(3, 2)(ones(2, 3).double()),
    "expected m1 and m2 to have the same dtype": lambda: ones(2, 2) @ ones(2, 2).double(),
    "expected target dtype to be Long": lambda: F.cross_entropy(ones(2, 3), ones(2)),
    "Input type (unsigned char)": lambda: nn.Conv2d(3, 8, 3)(ones(1, 3, 8, 8).byte()),
    "0D or 1D target tensor expected": lambda: F.cross_entropy(ones(2, 3), ones(2, 1).long()),
    "Target size": lambda: F.binary_cross_entropy_with_logits(ones(2, 1), ones(2)),
    "Using a target size": lambda: F.mse_loss(ones(2, 1), ones(2)),
    "Target 3 is out of bounds": lambda: F.cross_entropy(ones(1, 3), torch.tensor([9])),
    "Expected input batch_size": lambda: F.cross_entropy(ones(4, 3), ones(2).long()),
    "stack expects each tensor": lambda: default_collate([ones(3, 4), ones(3, 5)]),
    "Sizes of tensors must match": lambda: torch.cat([ones(2, 3), ones(2, 4)]),
    "The size of tensor a": lambda: ones(2, 3) + ones(7),
    "shape '[4]' is invalid": lambda: ones(2, 3).view(4),
    "view size is not compatible": lambda: ones(2, 3).t().view(-1),
    "permute: number of dimensions": lambda: ones(2, 3).permute(0, 1, 2),
    "Dimension out of range": lambda: ones(2, 3).sum(5),
    "The expanded size of the tensor": lambda: ones(2, 3).expand(4, 3),
    "too many values to unpack": taken_apart,
    "Given groups=1, weight of size": lambda: nn.Conv2d(3, 8, 3)(ones(2, 8, 8, 3)),
    "Expected 3D (unbatched) or 4D": lambda: nn.Conv2d(3, 8, 3)(ones(8, 8)),
    "Calculated padded input size": lambda: nn.Conv2d(3, 8, 7)(ones(1, 3, 4, 4)),
    "Given input size:": lambda: nn.MaxPool2d(2)(ones(1, 1, 1, 1)),
    "in_channels must be divisible": lambda: nn.Conv2d(3, 4, 3, groups=2),
    "embed_dim must be divisible": lambda: nn.MultiheadAttention(10, 3),
    "input.size(-1) must be equal": lambda: nn.LSTM(3, 4)(ones(2, 5)),
    "linear(): argument 'input'": lambda: nn.Sequential(nn.LSTM(2, 2), nn.Linear(2, 1))(ones(3, 2)),
    "Input and output must have the same": lambda: F.interpolate(
        ones(3, 4, 4), (2, 2), mode="bilinear"
    ),
    "expected sequence of length": lambda: torch.tensor([[1, 2], [3]]),
    "too many dimensions 'str'": lambda: torch.tensor(["cat"]),
    "result type Float can't be cast": lambda: ones(2).long().add_(0.5),
    "one_hot is only applicable": lambda: F.one_hot(ones(2)),
    "Class values must be smaller": lambda: F.one_hot(torch.tensor([5]), 3),
    "Class values must be non-negative": lambda: F.one_hot(torch.tensor([-1])),
    "index out of range in self": lambda: nn.Embedding(3, 2)(torch.tensor([5])),
    "Expected tensor for argument #1": lambda: nn.Embedding(3, 2)(ones(1)),
    "index 5 is out of bounds": lambda: ones(3)[7],
    "tensors used as indices": lambda: ones(3)[ones(1)],
    "Boolean value of Tensor": lambda: bool(ones(2)),
    "a Tensor with 2 elements": lambda: ones(3).item(),
    "iteration over a 0-d tensor": lambda: iter(torch.tensor(1)),
    "len() of a 0-d tensor": lambda: len(torch.tensor(1)),
    "Got unsupported ScalarType BFloat16": lambda: ones(1).bfloat16().numpy(),
    "can't convert np.ndarray": lambda: torch.tensor(np.array([object()])),
    "At least one stride": lambda: torch.from_numpy(np.zeros(3)[::-1]),
    "all elements of input": lambda: F.binary_cross_entropy(2 * ones(1), ones(1)),
    "Implicit dimension choice": lambda: F.softmax(ones(2, 3)),
    "invalid multinomial distribution": lambda: torch.multinomial(torch.zeros(3), 1),
    "Low precision dtypes": lambda: torch.linalg.inv(ones(2, 2).half()),
    "element 0 of tensors": lambda: ones(1).backward(),
    "grad can be implicitly created": (weight() * 2).backward,
    "Trying to backward through": twice,
    "one of the variables needed": changed_in_place,
    "a leaf Variable": lambda: weight().add_(1),
    "Can't call numpy()": lambda: weight().numpy(),
    "Only Tensors of floating point": lambda: ones(2, dtype=torch.long, requires_grad=True),
    "The differentiated Tensor": lambda: torch.autograd.grad(weight().sum(), [weight()]),
    "Inference tensors cannot be": made_for_inference,
    "Function 'SqrtBackward0'": not_a_number,
    "unscale_() has already been": unscaled_twice,
    "Attempted step but _scale": no_scaled_loss,
    "cannot assign module": NoInit,
    "Module [ModuleList]": lambda: nn.ModuleList([nn.Linear(1, 1)])(ones(1)),
    "forward() missing 1": nn.Linear(1, 1),
    "optimizer got an empty": lambda: torch.optim.SGD([], 0.1),
    "can't optimize a non-leaf": lambda: torch.optim.SGD([weight() * 2], 0.1),
    "Invalid learning rate": lambda: torch.optim.SGD([weight()], -1),
    "loaded state dict contains": other_groups,
    "param 'initial_lr'": lambda: torch.optim.lr_scheduler.StepLR(
        torch.optim.SGD([weight()], 0.1), 1, last_epoch=5
    ),
    "Unexpected key(s)": lambda: nn.Linear(2, 3).load_state_dict({"module.weight": ones(3, 2)}),
    "size mismatch for": lambda: nn.Linear(2, 3).load_state_dict(nn.Linear(2, 4).state_dict()),
    "PytorchStreamReader failed": cut_off,
    "Weights only load failed": other_objects,
    "Expected more than 1 value": lambda: nn.BatchNorm1d(3)(ones(1, 3)),
    "default_collate: batch must": lambda: default_collate([None, None]),
    "num_samples should be": lambda: DataLoader(TensorDataset(ones(0, 3)), shuffle=True),
    "Sum of input lengths": lambda: random_split(range(3), [1, 1]),  # type: ignore[arg-type]
    "Can't pickle local object": lambda: pickle.dumps(lambda: 0),
    "Default process group": torch.distributed.get_rank,
    "DefaultCPUAllocator": lambda: torch.empty(1 << 50),
    "Could not infer dtype of NoneType": lambda: torch.tensor([1, None]),
    "Tensors must have same number": lambda: torch.cat([ones(2, 3), ones(2, 3, 4)]),
    "mean(): could not infer": lambda: ones(2).long().mean(),
    "The shape of the mask": lambda: ones(3)[torch.tensor([True, False])],
    "output with shape": lambda: normalize(ones(1, 4, 4), [0.5] * 3, [0.5] * 3),
    "pic should be PIL Image": lambda: to_tensor("cat.jpg"),
    "probability tensor contains": lambda: torch.multinomial(torch.tensor([-1.0, 2.0]), 1),
    "Cannot copy out of meta": lambda: nn.Linear(1, 1, device="meta").to("cpu"),
    "linalg.inv: The diagonal": lambda: torch.linalg.inv(torch.zeros(2, 2)),
    "module 'numpy' has no": lambda: np.float,  # type: ignore[attr-defined]
    "No inf checks were recorded": scaled_other_weight,
    "Attempting to unscale FP16": float16_weight,
    "you can only change requires_grad": lambda: (weight() * 2).requires_grad_(False),
    "some parameters appear in more": in_two_groups,
    "'collections.OrderedDict' object": weights_alone,
    "Caught ValueError in DataLoader": lambda: next(iter(DataLoader(Fails(), num_workers=1))),
    "trying to initialize the default": begun_twice,
}
# As those print them who have the machine for it.
ELSEWHERE = {
    "DataLoader worker (pid(s)": "RuntimeError: DataLoader worker (pid 77) is killed by signal: Killed.",
    "Too many open files": "RuntimeError: received 0 items of ancdata",
    "CUDA out of memory": "CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total "
    "capacity of 23.65 GiB of which 120.00 MiB is free.",
    "cuDNN error: CUDNN_STATUS_EX": "RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
    "operator torchvision::nms": "RuntimeError: operator torchvision::nms does not exist",
    "undefined symbol": "ImportError: libtorch_cuda.so: undefined symbol: ncclCommRegister",
    "unexpected EOF": "RuntimeError: unexpected EOF, expected 99 more bytes. The file might be corrupted.",
    "A module that was compiled": "A module that was compiled using NumPy 1.x cannot be run in\n"
    "NumPy 2.4.1 as it may crash.",
    "No backend type": "RuntimeError: No backend type associated with device type cpu",
    "Connection closed by peer": "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed "
    "by peer [127.0.0.1]:4711",
    "torch._dynamo hit": "torch._dynamo hit config.recompile_limit (8)\n   function: 'f' (a.py:3)",
    "np.Inf was removed": "AttributeError: `np.Inf` was removed in the NumPy 2.0 release. Use `np.inf` "
    "instead.",
    "np.float_ was removed": "AttributeError: `np.float_` was removed in the NumPy 2.0 release. Use "
    "`np.float64` instead.",
    "module 'numpy' has no attribute 'product'": "AttributeError: module 'numpy' has no attribute 'product'",
    "module 'PIL.Image' has": "AttributeError: module 'PIL.Image' has no attribute 'ANTIALIAS'",
    "'ImageDraw' object": "AttributeError: 'ImageDraw' object has no attribute 'textsize'",
    "'FreeTypeFont' object": "AttributeError: 'FreeTypeFont' object has no attribute 'getsize'",
    "got an unexpected keyword": "TypeError: zeros() got an unexpected keyword argument 'names'",
}


@pytest.mark.parametrize("start", MESSAGES)
def test_a_message_as_torch_prints_it_finds_its_row(start: str) -> None:
    with warnings.catch_warnings(), pytest.raises(Exception) as caught:
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Anomaly Detection")
        MESSAGES[start]()
    text = f"{type(caught.value).__name__}: {caught.value}"
    for chinese in (False, True):
        first = index(chinese=chinese).search(text, top=1)[0]
        assert first.name.startswith("errors_and_old_names.md#"), text
        assert start in first.line, (text, first.line)


@pytest.mark.parametrize("start", ELSEWHERE)
def test_a_message_of_another_machine_finds_its_row(start: str) -> None:
    for chinese in (False, True):
        first = index(chinese=chinese).search(ELSEWHERE[start], top=1)[0]
        assert first.name.startswith("errors_and_old_names.md#"), first.name
        assert start in first.line, first.line


@pytest.mark.parametrize("chinese", [False, True])
def test_there_are_rows_for_150_messages(*, chinese: bool) -> None:
    rows = [one for one in index(chinese=chinese).entries if one.messages is not None]
    old_names = [one for one in rows if one.name.endswith(("#old-names", "#旧名称"))]
    assert old_names
    assert len(rows) - len(old_names) >= 150
