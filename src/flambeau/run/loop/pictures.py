"""Small pictures of what a model was given, for a report.

N: images, C: channels, H: height, W: width.
"""

import base64
import io
import math

import torch
from PIL import Image
from torch import Tensor

from flambeau.images.channels import num_shown

_SIDE = 112  # largest width and height, px; on a page they are side by side
_COLUMNS = 8  # of a sheet


def data_uri(x_CHW: Tensor, *, pictures: int = 1) -> str:
    """An image of at most 112 x 112 px as text for a page: 'data:image/jpeg;base64,...'.

    uint8, or floating from 0 to 1; for channels see `shown_channels`. `pictures`: side by side, each of which
    may be so wide.
    """
    content = base64.b64encode(_as_jpeg(_small(_image(x_CHW), pictures))).decode()
    return f"data:image/jpeg;base64,{content}"


def contact_sheet(x_NCHW: Tensor) -> bytes:
    """Images of one size, eight in a row, as a JPEG file; values as in `data_uri`."""
    images = [_small(_image(x)) for x in x_NCHW]
    width, height = (length + 4 for length in images[0].size)
    columns = min(_COLUMNS, len(images))
    size = columns * width, math.ceil(len(images) / columns) * height
    sheet = Image.new(images[0].mode, size, "white")
    for number, image in enumerate(images):
        sheet.paste(image, (number % columns * width + 2, number // columns * height + 2))
    return _as_jpeg(sheet)


def shown_channels(x_NCHW: Tensor) -> Tensor:
    """What is shown of images with other channels than grey or color; see `num_shown`."""
    return x_NCHW[:, : num_shown(x_NCHW.shape[1])]


def unit_range(x_NCHW: Tensor) -> Tensor:
    """Images of an unknown unit, each scaled from its range to 0 .. 1."""
    low, high = (end(x_NCHW, dim=(1, 2, 3), keepdim=True) for end in (torch.amin, torch.amax))
    return (x_NCHW - low) / (high - low).clamp(min=1e-12)


def _image(x_CHW: Tensor) -> Image.Image:
    x = shown_channels(x_CHW[None])[0].detach().cpu()
    if x.dtype != torch.uint8:
        x = x.float().nan_to_num(0).clamp(0, 1).mul(255).round().to(torch.uint8)
    pixels = x.permute(1, 2, 0).contiguous().numpy()
    return Image.fromarray(pixels if x.shape[0] == 3 else pixels[:, :, 0])


def _small(image: Image.Image, pictures: int = 1) -> Image.Image:
    """Each picture at most 112 px; tiny images are enlarged without smoothing."""
    longest = max(image.height, image.width // pictures)
    if longest > _SIDE:
        image.thumbnail((_SIDE * pictures, _SIDE))
        return image
    times = max(1, _SIDE // longest)
    return image.resize((image.width * times, image.height * times), Image.Resampling.NEAREST)


def _as_jpeg(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=82)
    return file.getvalue()
