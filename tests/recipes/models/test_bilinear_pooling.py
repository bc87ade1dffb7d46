import pytest
import torch
from torch import Tensor, nn

from flambeau.recipes.models.bilinear_pooling import BilinearPooling, bilinear_pooling


def naive(x: Tensor, y: Tensor) -> Tensor:
    """The paper's words, place by place in float64, without the eps."""
    x, y = x.double(), y.double()
    z = torch.zeros(x.shape[0], x.shape[1], y.shape[1], dtype=torch.float64)
    for row in range(x.shape[2]):
        for column in range(x.shape[3]):
            for n in range(len(x)):
                z[n] += torch.outer(x[n, :, row, column], y[n, :, row, column])
    z = z.flatten(1) / x[0, 0].numel()
    z = z.sign() * z.abs().sqrt()
    return z / z.square().sum(1, keepdim=True).sqrt()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_equals_the_naive_formula_and_einsum(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(2, 3, 4, 2).to(dtype), torch.randn(2, 5, 4, 2).to(dtype)
    got = bilinear_pooling(x, y, eps=1e-12)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(got.double(), naive(x, y), rtol=1e-5, atol=1e-6)
    alone = bilinear_pooling(x, eps=1e-12).double()
    torch.testing.assert_close(alone, naive(x, x), rtol=1e-5, atol=1e-6)
    z = torch.einsum("nchw,ndhw->ncd", x.double(), y.double()).flatten(1)
    z = torch.nn.functional.normalize(z.sign() * z.abs().sqrt())
    torch.testing.assert_close(got.double(), z, rtol=1e-5, atol=1e-6)


def test_the_default_eps_changes_little() -> None:
    x = torch.randn(2, 8, 7, 7)
    torch.testing.assert_close(bilinear_pooling(x).double(), naive(x, x), rtol=0, atol=2e-3)
    torch.testing.assert_close(bilinear_pooling(x).norm(dim=1), torch.ones(2))


def test_gradcheck() -> None:
    x = torch.randn(2, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    y = torch.randn(2, 2, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(bilinear_pooling, (x, y))
    assert torch.autograd.gradcheck(bilinear_pooling, (x,))


@pytest.mark.parametrize("other", [False, True])
def test_gradients_are_finite_at_zero(other: bool) -> None:
    x = torch.zeros(2, 3, 2, 2, requires_grad=True)
    y = torch.ones(2, 3, 2, 2) if other else None
    out = bilinear_pooling(x, y)
    (out * torch.randn(2, 9)).sum().backward()
    torch.testing.assert_close(out.detach(), torch.zeros(2, 9))
    assert x.grad is not None
    assert x.grad.isfinite().all()
    # A channel that never fires, beside others that do.
    x = torch.randn(2, 3, 2, 2)
    x[:, 1] = 0
    x.requires_grad_()
    bilinear_pooling(x)[:, :4].sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_half_precision_does_not_overflow() -> None:
    x = torch.full((1, 2, 8, 8), 300.0, dtype=torch.float16, requires_grad=True)  # 300^2 > 65504
    with torch.autocast("cpu", torch.float16):
        out = bilinear_pooling(x)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.detach(), torch.full((1, 4), 0.5))
    out[0, 0].backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert x.grad.dtype == torch.float16


def test_layer() -> None:
    layer = BilinearPooling(eps=1e-6)
    x, y = torch.randn(2, 3, 4, 4), torch.randn(2, 2, 4, 4)
    torch.testing.assert_close(layer(x, y), bilinear_pooling(x, y, eps=1e-6), rtol=0, atol=0)
    torch.testing.assert_close(layer(x), bilinear_pooling(x, eps=1e-6), rtol=0, atol=0)
    assert not list(layer.state_dict())
    assert "1e-06" in repr(layer)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), layer, nn.Linear(16, 2))
    assert model(torch.randn(2, 3, 6, 6)).shape == (2, 2)


def test_meta_device() -> None:
    assert bilinear_pooling(torch.empty(2, 3, 4, 4, device="meta")).shape == (2, 9)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda() -> None:
    x = torch.randn(2, 3, 4, 4)
    got = bilinear_pooling(x.to("cuda"), eps=1e-12)
    torch.testing.assert_close(got.cpu().double(), naive(x, x), rtol=1e-2, atol=1e-2)


def test_refusals() -> None:
    x = torch.ones(2, 3, 4, 4)
    with pytest.raises(ValueError, match=r"\(N, C, H, W\)"):
        bilinear_pooling(x[0])
    with pytest.raises(ValueError, match=r"\(2, 3, 4, 4\) and \(2, 3, 4, 3\)"):
        bilinear_pooling(x, x[..., :3])
    with pytest.raises(ValueError, match="no places"):
        bilinear_pooling(x[:, :, :0])
    with pytest.raises(ValueError, match="eps"):
        bilinear_pooling(x, eps=0.0)
    with pytest.raises(TypeError, match="int64"):
        bilinear_pooling(x.long())
