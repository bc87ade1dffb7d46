import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from flambeau.recipes.training.clipping import clip_grad_norm, grad_norm

WAITS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal"}
SHAPES = [(7, 5), (7,), (3, 7), ()]
MIXES = {
    "fp32": [torch.float32],
    "fp64": [torch.float64],
    "fp32+fp64": [torch.float32, torch.float64],
}


class Recorder(TorchDispatchMode):
    """The names of all operations; the ones in WAITS read a tensor on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def parameters(dtypes: list[torch.dtype], scale: float = 1.0) -> list[nn.Parameter]:
    """With gradients that are the same at every call; the third has none."""
    generator = torch.Generator().manual_seed(0)
    out = []
    for i, shape in enumerate(SHAPES):
        p = nn.Parameter(torch.zeros(shape, dtype=dtypes[i % len(dtypes)]))
        if i != 2:
            p.grad = (scale * torch.randn(shape, generator=generator)).to(p.dtype)
        out.append(p)
    return out


def grads(ps: list[nn.Parameter]) -> list[Tensor]:
    return [p.grad for p in ps if p.grad is not None]


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.5, 1e3, math.inf])
def test_norm_and_gradients_are_torchs_to_the_bit(mix, norm_type, max_norm):
    ours, theirs = parameters(MIXES[mix]), parameters(MIXES[mix])
    norm = clip_grad_norm(ours, max_norm, norm_type=norm_type)
    expected = nn.utils.clip_grad_norm_(theirs, max_norm, norm_type)
    torch.testing.assert_close(norm, expected, rtol=0, atol=0)
    torch.testing.assert_close(grads(ours), grads(theirs), rtol=0, atol=0)
    assert ours[2].grad is None


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_norm_is_that_of_one_long_vector(norm_type):
    ps = parameters(MIXES["fp32+fp64"])
    whole = torch.cat([g.flatten().double() for g in grads(ps)])
    expected = torch.linalg.vector_norm(whole, norm_type)
    before = [g.clone() for g in grads(ps)]
    torch.testing.assert_close(grad_norm(ps, norm_type=norm_type), expected, rtol=1e-6, atol=0)
    assert all(torch.equal(a, b) for a, b in zip(grads(ps), before, strict=True))


@pytest.mark.parametrize(
    "dtypes",
    [[torch.bfloat16], [torch.float16], [torch.float32, torch.bfloat16]],
    ids=["bf16", "fp16", "fp32+bf16"],
)
def test_low_precision_gradients_have_a_float32_norm(dtypes):
    ps = parameters(dtypes)
    before = [g.double() for g in grads(ps)]
    exact = torch.cat([g.flatten() for g in before]).norm()
    norm = clip_grad_norm(ps, 0.5)
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm.double(), exact, rtol=1e-6, atol=0)
    assert [g.dtype for g in grads(ps)] == [p.dtype for p in ps if p.grad is not None]
    for after, old in zip(grads(ps), before, strict=True):
        torch.testing.assert_close(after.double(), old * 0.5 / exact, rtol=1e-2, atol=1e-4)


def test_a_float16_norm_does_not_overflow():
    ours, theirs = (nn.Parameter(torch.zeros(4, dtype=torch.float16)) for _ in range(2))
    ours.grad, theirs.grad = (torch.full((4,), 6e4, dtype=torch.float16) for _ in range(2))
    torch.testing.assert_close(clip_grad_norm(ours, 2.0), torch.tensor(1.2e5), rtol=1e-3, atol=0)
    torch.testing.assert_close(ours.grad.float(), torch.ones(4), rtol=2e-3, atol=0)
    # torch's norm is float16 here, infinite, and it clips the gradients to 0.
    assert nn.utils.clip_grad_norm_(theirs, 2.0).isinf()
    assert not theirs.grad.any()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_norm_that_is_not_finite_does_what_torch_does(bad):
    ours, theirs = parameters([torch.float32]), parameters([torch.float32])
    for ps in (ours, theirs):
        ps[1].grad[3] = bad
    norm = clip_grad_norm(ours, 1.0)
    expected = nn.utils.clip_grad_norm_(theirs, 1.0)
    torch.testing.assert_close(norm, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(grads(ours), grads(theirs), rtol=0, atol=0, equal_nan=True)
    assert ours[1].grad[3].isnan()
    if math.isnan(bad):
        assert all(g.isnan().all() for g in grads(ours))
    else:
        assert not ours[0].grad.any()  # all others are 0


def test_gradients_may_be_passed_for_parameters():
    ps, same = parameters([torch.float32]), parameters([torch.float32])
    norm = clip_grad_norm([p.grad for p in ps], 0.5)  # with a None, and in place
    torch.testing.assert_close(norm, clip_grad_norm(same, 0.5), rtol=0, atol=0)
    torch.testing.assert_close(grads(ps), grads(same), rtol=0, atol=0)


def test_a_frozen_parameter_is_no_gradient():
    frozen, trained = (
        nn.Parameter(torch.full((2,), 9.0), requires_grad=False),
        parameters([torch.float32]),
    )
    torch.testing.assert_close(
        clip_grad_norm([frozen, *trained], 0.5), grad_norm(parameters([torch.float32]))
    )
    assert frozen.tolist() == [9.0, 9.0]


def test_one_tensor_and_a_generator_are_taken():
    layer = nn.Linear(2, 2)
    layer(torch.ones(1, 2)).sum().backward()
    torch.testing.assert_close(grad_norm(layer.weight), torch.tensor(2.0))
    torch.testing.assert_close(clip_grad_norm(layer.parameters(), 1.0), torch.tensor(6.0).sqrt())
    torch.testing.assert_close(grad_norm(layer.parameters()), torch.tensor(1.0))


def test_without_gradients_the_norm_is_zero():
    for nothing in ([], [None], [nn.Parameter(torch.ones(2))]):
        norm = clip_grad_norm(nothing, 1.0)
        assert torch.equal(norm, nn.utils.clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0))
        assert norm.shape == ()


def test_an_exhausted_generator_is_refused():
    ps = iter(parameters([torch.float32]))
    clip_grad_norm(ps, 1.0)
    with pytest.raises(ValueError, match="can be read once"):
        clip_grad_norm(ps, 1.0)


def test_gradients_with_a_graph():
    x = torch.ones(2, requires_grad=True)
    (gradient,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    with pytest.raises(ValueError, match=r"pass its .detach\(\)"):
        clip_grad_norm([gradient], 1.0)
    x.grad = gradient  # what backward(create_graph=True) leaves
    norm = clip_grad_norm(x, 1.0)
    assert not norm.requires_grad
    torch.testing.assert_close(x.grad.detach(), torch.full((2,), 0.5**0.5))
    x.grad = None  # a gradient that holds its parameter is a cycle


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_sparse_gradients_are_clipped_too():
    tables = [nn.Embedding(5, 3, sparse=True) for _ in range(2)]
    for table in tables:
        table(torch.tensor([1, 2, 1])).sum().backward()
    try:
        expected = nn.utils.clip_grad_norm_(tables[1].parameters(), 0.1)
    except NotImplementedError:
        pytest.skip(f"torch {torch.__version__} has no norm of sparse tensors")
    norm = clip_grad_norm(tables[0].parameters(), 0.1)
    torch.testing.assert_close(norm, expected, rtol=0, atol=0)
    clipped = [table.weight.grad.to_dense() for table in tables]
    torch.testing.assert_close(clipped[0], clipped[1], rtol=0, atol=0)


@pytest.mark.parametrize("max_norm", [0.0, -1.0, math.nan])
def test_max_norm_out_of_range_is_refused(max_norm):
    with pytest.raises(ValueError, match="max_norm must be above 0"):
        clip_grad_norm(parameters([torch.float32]), max_norm)


@pytest.mark.parametrize("norm_type", [0.0, -math.inf, math.nan])
def test_norm_type_out_of_range_is_refused(norm_type):
    with pytest.raises(ValueError, match="norm_type must be above 0"):
        clip_grad_norm([], 1.0, norm_type=norm_type)


@pytest.mark.parametrize("mix", MIXES)
def test_nothing_is_read_on_the_host(mix):
    ps = parameters(MIXES[mix])
    with Recorder() as recorder:
        clip_grad_norm(ps, 0.5)
    assert {"_foreach_norm", "_foreach_mul_"} <= recorder.names
    assert not recorder.names & WAITS


def test_result_is_on_the_device_of_the_gradients():
    norm = clip_grad_norm([torch.empty(3, device="meta"), torch.empty(2, device="meta")], 1.0)
    assert norm.device.type == "meta"
    assert norm.shape == ()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_cuda_nothing_waits(dtype):
    here, there = parameters([dtype]), []
    for p in here:
        there.append(nn.Parameter(p.detach().cuda()))
        there[-1].grad = None if p.grad is None else p.grad.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        norm = clip_grad_norm(there, 0.5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(norm.cpu(), clip_grad_norm(here, 0.5), rtol=1e-5, atol=0)
    after = [g.cpu() for g in grads(there)]
    torch.testing.assert_close(after, grads(here), rtol=1e-2, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_parameters_on_two_devices():
    here, split = parameters([torch.float32]), parameters([torch.float32])
    split[0] = nn.Parameter(split[0].detach().cuda())
    split[0].grad = here[0].grad.cuda()
    norm = clip_grad_norm(split, 0.5)
    assert norm.is_cuda
    torch.testing.assert_close(norm.cpu(), clip_grad_norm(here, 0.5), rtol=1e-5, atol=0)
    torch.testing.assert_close([g.cpu() for g in grads(split)], grads(here), rtol=1e-5, atol=1e-7)
