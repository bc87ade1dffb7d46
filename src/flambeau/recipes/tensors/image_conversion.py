"""Convert images between NumPy, PIL and tensors, correctly for every mode and dtype, with helpful errors.

图像在 NumPy、PIL 与张量之间的转换，每种模式和数据类型都正确，报错会说明该怎么做。

Source: the modes of the Pillow handbook ("Concepts"); torchvision's `pil_to_tensor` and `to_pil_image`, from
which this differs where they wrap, truncate, refuse or return palette indices. Not for batches, and not for
decoding files.

Each of the four conversions returns a copy; no memory is shared.

C: channels, 1 to 4; H, W: height and width.
"""

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    import numpy.typing as npt
    from PIL import Image

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32)
_REALS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Modes whose values are kept: their dtype, and the dtypes that fit without loss (except float64 in F).
_KEPT = {
    "1": (torch.bool, (torch.bool,)),
    "P": (torch.uint8, (torch.uint8,)),
    "I;16": (torch.uint16, (torch.uint8, torch.uint16)),
    "I": (torch.int32, _INTEGERS),
    "F": (torch.float32, _REALS),
}
_CHANNELS = {"L": 1, "LA": 2, "RGB": 3, "YCbCr": 3, "HSV": 3, "LAB": 3, "RGBA": 4, "CMYK": 4}


def tensor_from_array(
    array: "npt.NDArray[Any]", *, layout: Literal["HWC", "CHW"] = "HWC", bgr: bool = False
) -> Tensor:
    """Copy an array into a (C, H, W) tensor of the same dtype and values.

    Args:
        array: (H, W) or as `layout` says, with any strides and byte order, even read-only; bool, integer or
            float.
        layout: the order of the dimensions.
        bgr: the array is BGR or BGRA, as OpenCV reads images; the tensor is RGB or RGBA.

    Raises:
        ValueError: the shape is not an image of this layout; `bgr` without 3 or 4 channels.
        TypeError: not an array, or a dtype that torch lacks.

    Example:
        >>> import numpy as np
        >>> tensor_from_array(np.zeros((4, 5, 3), np.uint8)[::-1], bgr=True).shape
        torch.Size([3, 4, 5])
    """
    import numpy as np

    if not isinstance(array, np.ndarray):
        raise TypeError(f"array must be a NumPy array, got {type(array).__name__}")
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise TypeError(f"torch has no dtype {array.dtype}: convert with .astype(np.float32), say")
    turned = array.transpose(2, 0, 1) if layout == "HWC" and array.ndim == 3 else array
    if array.ndim == 2:
        turned = array[None]
    if layout not in ("HWC", "CHW") or turned.ndim != 3 or not 1 <= len(turned) <= 4:
        other = {"HWC": "CHW", "CHW": "HWC"}.get(layout)
        raise ValueError(
            f"an array of layout {layout!r} is (H, W), or (H, W, C) for HWC and (C, H, W) for CHW, with 1 to "
            f"4 channels; got shape {array.shape}: pass layout={other!r}, or one image of a batch"
        )
    image = torch.from_numpy(np.array(turned, dtype=array.dtype.newbyteorder("="), order="C"))
    return swap_red_blue(image) if bgr else image


def array_from_tensor(
    image: Tensor, *, layout: Literal["HWC", "CHW"] = "HWC", bgr: bool = False
) -> "npt.NDArray[Any]":
    """Copy an image tensor into an array of the same dtype (bfloat16 becomes float32) and values.

    Args:
        image: (C, H, W) or (H, W), on any device, with or without a graph.
        layout: of the array. With HWC a single channel is (H, W), as PIL, OpenCV and Matplotlib expect.
        bgr: the tensor is RGB or RGBA, the array BGR or BGRA.

    Raises:
        ValueError: the shape is not an image; an unknown layout; `bgr` without 3 or 4 channels.

    Example:
        >>> array_from_tensor(torch.zeros(3, 4, 5)).shape, array_from_tensor(torch.zeros(1, 4, 5)).shape
        ((4, 5, 3), (4, 5))
    """
    if layout not in ("HWC", "CHW"):
        raise ValueError(f"layout must be 'HWC' or 'CHW', got {layout!r}")
    image = _channels_first(image).detach().cpu()
    image = swap_red_blue(image) if bgr else image
    if image.dtype.is_floating_point and image.dtype not in (torch.float16, torch.float64):
        image = image.float()
    if layout == "HWC":
        image = image[0] if len(image) == 1 else image.permute(1, 2, 0)
    array: npt.NDArray[Any] = image.clone(memory_format=torch.contiguous_format).numpy()
    return array


def tensor_from_pil(image: "Image.Image", *, indices: bool = False) -> Tensor:
    """Copy a PIL image into a (C, H, W) tensor of the image's dtype; `to_float` scales it to [0, 1].

    Mode 1 becomes bool, I;16 uint16, I int32, F float32, all others uint8. A palette is expanded to RGB, or
    to RGBA if it has transparency.

    Args:
        image: of any mode.
        indices: return the indices of a palette image, such as the classes of a segmentation mask.

    Raises:
        ValueError: `indices` for an image without a palette.

    Example:
        >>> from PIL import Image
        >>> tensor_from_pil(Image.new("RGBA", (5, 4))).shape
        torch.Size([4, 4, 5])
    """
    import numpy as np

    if indices and image.mode not in ("P", "PA"):
        raise ValueError(f"mode {image.mode} has no palette: leave indices=True out")
    if image.mode in ("P", "PA") and not indices:
        image = image.convert("RGBA" if image.has_transparency_data else "RGB")
    return tensor_from_array(np.asarray(image))


def pil_from_tensor(image: Tensor, *, mode: str | None = None) -> "Image.Image":
    """Copy an image tensor into a PIL image; floats in [0, 1] go through `to_uint8`.

    Args:
        image: (C, H, W) or (H, W), on any device.
        mode: one of 1, L, LA, P, RGB, YCbCr, HSV, LAB, RGBA, CMYK, I, I;16, F. By default L, LA, RGB or RGBA
            by the number of channels; for one channel also 1 for bool, I;16 for uint16, I for int16 and
            int32. Modes 1, P, I, I;16 and F keep the values; color spaces are not converted.

    Raises:
        ValueError: the shape is not an image, the mode is unknown or has other channels, or NaN.
        TypeError: the mode cannot hold the dtype.

    Example:
        >>> image = pil_from_tensor(torch.tensor([[[0.0, 0.5, 1.1, -0.2]]]))
        >>> image.mode, list(image.tobytes())
        ('L', [0, 128, 255, 0])
    """
    from PIL import Image

    image = _channels_first(image).detach().cpu()
    kinds = {torch.bool: "1", torch.uint16: "I;16", torch.int16: "I", torch.int32: "I"}
    if mode is None:
        mode = kinds.get(image.dtype) if len(image) == 1 else None
        mode = mode or ("L", "LA", "RGB", "RGBA")[len(image) - 1]
    if mode not in _KEPT and mode not in _CHANNELS:
        raise ValueError(f"mode must be one of {', '.join([*_KEPT, *_CHANNELS])}, got {mode!r}")
    if len(image) != _CHANNELS.get(mode, 1):
        raise ValueError(
            f"mode {mode} has {_CHANNELS.get(mode, 1)} channels, got {tuple(image.shape)}"
        )
    if mode not in _KEPT:
        image = to_uint8(image)
    elif image.dtype in _KEPT[mode][1]:
        image = image.to(_KEPT[mode][0])
    else:
        raise TypeError(
            f"mode {mode} holds {', '.join(map(str, _KEPT[mode][1]))}, got {image.dtype}"
        )
    array = array_from_tensor(image)
    if mode == "1":
        return Image.fromarray(array)
    return Image.frombytes(mode, (image.shape[2], image.shape[1]), array.tobytes())


def to_uint8(image: Tensor) -> Tensor:
    """Scale [0, 1] (or bool, uint16) to 0 to 255, rounded and clamped; uint8 is returned as it is.

    Args:
        image: any shape and device; floating, bool, uint8 or uint16.

    Raises:
        TypeError: another integer dtype, whose value for white is not known.
        ValueError: NaN; the check waits for the device.

    Example:
        >>> to_uint8(torch.tensor([-0.1, 0.999, 1.1])).tolist()
        [0, 255, 255]
    """
    if image.dtype == torch.uint8:
        return image
    if image.dtype == torch.bool:
        return image.to(torch.uint8) * 255
    if image.dtype == torch.uint16:
        return ((image.to(torch.int32) + 128) // 257).to(torch.uint8)  # 65535 = 255 * 257
    _refuse_integers(image)
    real = image if image.dtype == torch.float64 else image.float()
    if bool(real.isnan().any()):
        raise ValueError(f"{int(real.isnan().sum())} values are NaN, which is no brightness")
    return (real.clamp(0, 1) * 255).round().to(torch.uint8)


def to_float(image: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Convert to floats in [0, 1]: uint8 divided by 255, uint16 by 65535; floats keep their values.

    Args:
        image: any shape and device; floating, bool, uint8 or uint16.
        dtype: of the result; with 16 bits or more, `to_uint8` restores the same uint8 values.

    Raises:
        TypeError: another integer dtype, whose value for white is not known.

    Example:
        >>> to_float(torch.tensor([0, 51, 255], dtype=torch.uint8))
        tensor([0.0000, 0.2000, 1.0000])
    """
    if image.dtype in (torch.uint8, torch.uint16):
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        return (image.to(exact) / torch.iinfo(image.dtype).max).to(dtype)
    if image.dtype != torch.bool:
        _refuse_integers(image)
    return image.to(dtype)


def swap_red_blue(image: Tensor) -> Tensor:
    """Convert RGB to BGR or back, or RGBA to BGRA or back; returns a copy.

    Args:
        image: (..., C, H, W), C 3 or 4.

    Raises:
        ValueError: another number of channels.

    Example:
        >>> swap_red_blue(torch.tensor([1, 2, 3, 4]).view(4, 1, 1)).flatten().tolist()
        [3, 2, 1, 4]
    """
    if image.ndim < 3 or image.shape[-3] not in (3, 4):
        raise ValueError(f"red and blue need (..., 3 or 4, H, W), got {tuple(image.shape)}")
    return image[..., [2, 1, 0, 3][: image.shape[-3]], :, :]


def _refuse_integers(image: Tensor) -> None:
    if not image.dtype.is_floating_point:
        raise TypeError(
            f"{image.dtype} does not say which value is white: divide by it for floats of [0, 1], or convert "
            "to torch.uint8 or torch.uint16"
        )


def _channels_first(image: Tensor) -> Tensor:
    if image.ndim == 2:
        return image[None]
    if image.ndim != 3 or not 1 <= len(image) <= 4:
        raise ValueError(
            f"an image is (H, W) or (C, H, W) with 1 to 4 channels, got {tuple(image.shape)}: take one image "
            "of a batch, and .permute(2, 0, 1) one of (H, W, C)"
        )
    return image
