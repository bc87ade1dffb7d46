import warnings
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import functional as tv

from flambeau.recipes.tensors.image_conversion import (
    array_from_tensor,
    pil_from_tensor,
    swap_red_blue,
    tensor_from_array,
    tensor_from_pil,
    to_float,
    to_uint8,
)

NUMPY_DTYPES = [
    "bool",
    "uint8",
    "int8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "float32",
    "float64",
]
EIGHT_BITS = {"L": 1, "LA": 2, "RGB": 3, "YCbCr": 3, "HSV": 3, "LAB": 3, "RGBA": 4, "CMYK": 4}
SIXTEEN_BITS = np.array([[0, 1, 32767], [32768, 65000, 65535]], np.uint16)


def pixels(*shape: int) -> "np.ndarray[Any, Any]":
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def picture(mode: str, channels: int) -> Image.Image:
    array = pixels(4, 5, channels)
    return Image.frombytes(mode, (5, 4), array.tobytes())


# ---------------------------------------------------------------- arrays


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
@pytest.mark.parametrize("shape", [(4, 5), (4, 5, 1), (4, 5, 2), (4, 5, 3), (4, 5, 4)])
def test_array_and_back(dtype: str, shape: tuple[int, ...]) -> None:
    array = pixels(*shape).astype(dtype)
    tensor = tensor_from_array(array)
    assert tensor.shape == (shape[2] if len(shape) == 3 else 1, 4, 5)
    assert tensor.is_contiguous()
    for y, x in np.ndindex(4, 5):
        assert tensor[:, y, x].tolist() == np.atleast_1d(array[y, x]).tolist()
    back = array_from_tensor(tensor)
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array[..., 0] if shape[2:] == (1,) else array)
    np.testing.assert_array_equal(
        tensor_from_array(array_from_tensor(tensor, layout="CHW"), layout="CHW"), tensor
    )


@pytest.mark.parametrize(
    "array",
    [
        pixels(4, 5, 3)[::-1, ::-1],
        pixels(4, 5, 4)[..., ::-1],
        np.asfortranarray(pixels(4, 5, 3)),
        pixels(8, 5, 3)[::2],
        np.broadcast_to(pixels(5, 3), (4, 5, 3)),  # stride 0, and read-only
        pixels(4, 5).astype(">u2"),
        np.asarray(Image.new("RGB", (5, 4))),  # read-only
    ],
)
def test_any_strides_byte_order_and_read_only_arrays(array: "np.ndarray[Any, Any]") -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = tensor_from_array(array)
    np.testing.assert_array_equal(array_from_tensor(tensor), array)


def test_torch_warns_of_a_read_only_array_and_this_does_not() -> None:
    image = Image.new("L", (2, 2))
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # else it warns once per process
    try:
        tensor_from_pil(image)
        tensor_from_array(np.asarray(image))
        with pytest.warns(UserWarning, match="not writable"):
            torch.from_numpy(np.asarray(image))
    finally:
        torch.set_warn_always(before)


def test_nothing_shares_memory() -> None:
    for layout, shape in (("HWC", (4, 5, 3)), ("HWC", (4, 5, 1)), ("CHW", (3, 4, 5))):
        array = np.zeros(shape, np.float32)
        tensor = tensor_from_array(array, layout=layout)  # type: ignore[arg-type]
        tensor += 1
        assert not array.any()
        array_from_tensor(tensor, layout=layout)[:] = 7  # type: ignore[arg-type]
        assert tensor.eq(1).all()
    image = Image.new("L", (2, 2))
    tensor_from_pil(image).fill_(9)
    assert image.getextrema() == (0, 0)
    tensor = torch.zeros(1, 2, 2, dtype=torch.uint8)
    for mode in ("L", "P", "I;16", "I"):
        pil_from_tensor(tensor, mode=mode).putpixel((0, 0), 3)
        assert not tensor.any()
    scaled = to_uint8(tensor)
    assert scaled is tensor  # as `Tensor.to` does


def test_bgr() -> None:
    array = pixels(4, 5, 3)
    rgb = tensor_from_array(array, bgr=True)
    np.testing.assert_array_equal(array_from_tensor(rgb), array[..., ::-1])
    np.testing.assert_array_equal(array_from_tensor(rgb, bgr=True), array)
    with_alpha = pixels(4, 5, 4)
    rgba = tensor_from_array(with_alpha, bgr=True)
    np.testing.assert_array_equal(array_from_tensor(rgba), with_alpha[..., [2, 1, 0, 3]])
    batch = torch.arange(2 * 3).view(2, 3, 1, 1)
    assert swap_red_blue(batch).flatten().tolist() == [2, 1, 0, 5, 4, 3]


def test_bgr_as_opencv_has_it() -> None:
    cv2 = pytest.importorskip("cv2")
    array = pixels(4, 5, 3)
    encoded = cv2.imencode(".png", array)[1]
    image = tensor_from_array(cv2.imdecode(encoded, cv2.IMREAD_COLOR), bgr=True)
    np.testing.assert_array_equal(array_from_tensor(image), cv2.cvtColor(array, cv2.COLOR_BGR2RGB))


def test_bfloat16_and_graphs_reach_numpy() -> None:
    weight = torch.tensor([[0.5, 1.0]], dtype=torch.bfloat16, requires_grad=True)
    array = array_from_tensor(weight)
    assert (array.dtype, array.tolist()) == (np.float32, [[0.5, 1.0]])


# ---------------------------------------------------------------- PIL


@pytest.mark.parametrize(("mode", "channels"), EIGHT_BITS.items())
def test_eight_bit_modes(mode: str, channels: int) -> None:
    image = picture(mode, channels)
    tensor = tensor_from_pil(image)
    torch.testing.assert_close(tensor, tv.pil_to_tensor(image), rtol=0, atol=0)
    back = pil_from_tensor(tensor, mode=mode)
    assert (back.mode, back.size, back.tobytes()) == (mode, (5, 4), image.tobytes())
    torch.testing.assert_close(to_float(tensor), tv.to_tensor(image), rtol=0, atol=0)
    assert pil_from_tensor(to_float(tensor), mode=mode).tobytes() == image.tobytes()


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (2, "LA"), (3, "RGB"), (4, "RGBA")])
def test_mode_follows_the_channels(channels: int, mode: str) -> None:
    tensor = torch.from_numpy(pixels(channels, 4, 5))
    image = pil_from_tensor(tensor)
    assert image.mode == mode
    assert image.tobytes() == tv.to_pil_image(tensor).tobytes()
    assert pil_from_tensor(tensor[0]).mode == "L"


def test_bilevel() -> None:
    tensor = torch.tensor([[[True, False, True]]])
    image = pil_from_tensor(tensor)
    assert image.mode == "1"
    assert image.convert("L").tobytes() == b"\xff\x00\xff"
    assert tensor_from_pil(image).equal(tensor)
    assert pil_from_tensor(tensor, mode="L").tobytes() == b"\xff\x00\xff"


@pytest.mark.parametrize("mode", ["I;16", "I;16L", "I;16B", "I;16N"])
def test_sixteen_bits_do_not_wrap(mode: str) -> None:
    """torchvision's to_tensor makes 65000 of I;16 into -536, and its pil_to_tensor refuses I;16B."""
    order = ">u2" if mode == "I;16B" else "<u2"
    image = Image.frombytes(mode, (3, 2), SIXTEEN_BITS.astype(order).tobytes())
    tensor = tensor_from_pil(image)
    assert tensor.dtype == torch.uint16
    assert tensor.tolist() == [SIXTEEN_BITS.tolist()]
    back = pil_from_tensor(tensor)
    assert back.mode == "I;16"
    np.testing.assert_array_equal(np.asarray(back), SIXTEEN_BITS)
    assert float(to_float(tensor)[0, 1, 2]) == 1.0
    assert int(tv.to_tensor(Image.new("I;16", (1, 1), 65000))) == -536


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
def test_signed_integers_are_mode_i(dtype: torch.dtype) -> None:
    """torchvision makes int16 into I;16, where -1 is 65535."""
    tensor = torch.tensor([[[-1, 300], [-32768, 32767]]], dtype=dtype)
    image = pil_from_tensor(tensor)
    assert image.mode == "I"
    assert image.getpixel((0, 0)) == -1
    assert tensor_from_pil(image).tolist() == tensor.tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_mode_f_keeps_the_values(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[[-2.5, 0.25, 300.0]]], dtype=dtype)
    image = pil_from_tensor(tensor, mode="F")
    assert image.mode == "F"
    torch.testing.assert_close(tensor_from_pil(image), tensor.float(), rtol=0, atol=0)


def test_palettes_are_colors_and_masks_are_indices() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putpixel((1, 0), 1)
    assert tensor_from_pil(image).tolist() == [[[10, 40]], [[20, 50]], [[30, 60]]]
    assert tensor_from_pil(image, indices=True).tolist() == [[[0, 1]]]
    image.info["transparency"] = 1
    assert tensor_from_pil(image)[3].tolist() == [[255, 0]]
    mask = pil_from_tensor(torch.tensor([[0, 1]], dtype=torch.uint8), mode="P")
    assert (mask.mode, mask.tobytes()) == ("P", b"\x00\x01")
    with_alpha = image.convert("PA")
    assert tensor_from_pil(with_alpha).shape == (4, 1, 2)
    assert tensor_from_pil(with_alpha, indices=True).shape == (2, 1, 2)


# ---------------------------------------------------------------- scales


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_uint8_comes_back(dtype: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.uint8)
    scaled = to_float(every, dtype=dtype)
    assert scaled.dtype == dtype
    assert to_uint8(scaled).equal(every)


def test_floats_are_rounded_and_clamped() -> None:
    """torchvision's to_pil_image truncates, and wraps what is out of range."""
    tensor = torch.tensor([[[1.1, -0.1, 0.999, 0.5, float("inf"), -float("inf")]]])
    assert to_uint8(tensor).flatten().tolist() == [255, 0, 255, 128, 255, 0]
    assert list(tv.to_pil_image(tensor[..., :4]).tobytes()) == [24, 231, 254, 127]


def test_uint16_to_uint8_is_the_nearest() -> None:
    every = torch.arange(65536, dtype=torch.int32)
    expected = (every.double() / 65535 * 255).round().to(torch.uint8)
    assert to_uint8(every.to(torch.uint16)).equal(expected)


def test_bool_scales() -> None:
    mask = torch.tensor([True, False])
    assert to_uint8(mask).tolist() == [255, 0]
    assert to_float(mask).tolist() == [1.0, 0.0]


def test_floats_keep_their_values_in_to_float() -> None:
    tensor = torch.tensor([-0.5, 2.0], dtype=torch.float64)
    assert to_float(tensor).tolist() == [-0.5, 2.0]


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("array", "settings", "error", "message"),
    [
        (np.zeros((3, 64, 64)), {}, ValueError, r"got shape \(3, 64, 64\): pass layout='CHW'"),
        (np.zeros((64, 64, 3)), {"layout": "CHW"}, ValueError, "pass layout='HWC'"),
        (np.zeros((2, 8, 8, 3)), {}, ValueError, "one image of a batch"),
        (np.zeros(8), {}, ValueError, r"got shape \(8,\)"),
        (np.zeros((8, 8)), {"layout": "NHWC"}, ValueError, "layout 'NHWC'"),
        (np.zeros((8, 8)), {"bgr": True}, ValueError, r"3 or 4, H, W\), got \(1, 8, 8\)"),
        (np.zeros((8, 8), complex), {}, TypeError, "no dtype complex128"),
        (np.zeros((8, 8), object), {}, TypeError, "no dtype object"),
        ([[1, 2]], {}, TypeError, "must be a NumPy array, got list"),
    ],
)
def test_arrays_that_are_refused(
    array: Any, settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        tensor_from_array(array, **settings)


@pytest.mark.parametrize(
    ("tensor", "mode", "error", "message"),
    [
        (torch.zeros(1, 3, 4, 4), None, ValueError, r"got \(1, 3, 4, 4\): take one image"),
        (torch.zeros(8, 8, 3), None, ValueError, r"permute\(2, 0, 1\)"),
        (torch.zeros(3, 4, 4), "L", ValueError, r"mode L has 1 channels, got \(3, 4, 4\)"),
        (torch.zeros(3, 4, 4), "BGR", ValueError, "mode must be one of .*RGB.*got 'BGR'"),
        (torch.zeros(1, 4, 4), "I", TypeError, "mode I holds .*int32, got torch.float32"),
        (torch.zeros(1, 4, 4), "P", TypeError, "mode P holds torch.uint8, got torch.float32"),
        (torch.zeros(4, 4, dtype=torch.int64), None, TypeError, "int64 does not say which value"),
        (torch.zeros(3, 4, 4, dtype=torch.int16), None, TypeError, "int16 does not say"),
        (torch.full((1, 2, 2), torch.nan), None, ValueError, "4 values are NaN"),
    ],
)
def test_tensors_that_are_refused(
    tensor: torch.Tensor, mode: str | None, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        pil_from_tensor(tensor, mode=mode)


def test_other_refusals() -> None:
    with pytest.raises(ValueError, match="mode RGB has no palette"):
        tensor_from_pil(Image.new("RGB", (2, 2)), indices=True)
    with pytest.raises(TypeError, match="int32 does not say which value is white"):
        to_float(torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match="layout must be 'HWC' or 'CHW', got 'NHWC'"):
        array_from_tensor(torch.zeros(2, 2), layout="NHWC")  # type: ignore[arg-type]
