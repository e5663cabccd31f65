"""Images and heat maps as PNG data addresses, one file pixel per image pixel; the page enlarges them."""

import base64
import io
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from patchcert.errors import InvalidInput

Pixels = NDArray[np.uint8]

UNPROVEN = ((122, 36, 4), (214, 84, 22), (246, 178, 132), (247, 240, 232))
PROVEN = ((228, 238, 246), (138, 188, 226), (42, 122, 190), (8, 62, 122))
NOWHERE = (128, 128, 128)


def data_address(pixels: Pixels) -> str:
    """The image (c, h, w), or (h, w) in grey, as a PNG data address; the same pixels give the same text."""
    out = io.BytesIO()
    _picture(pixels).save(out, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode("ascii")


def sprite(images: Pixels, columns: int = 40) -> str:
    """All images (n, c, h, w) in one picture, row by row, so that a table can show each as a part of it."""
    count, channels, height, width = images.shape
    rows = math.ceil(count / columns)
    sheet = np.zeros((rows * columns, channels, height, width), dtype=np.uint8)
    sheet[:count] = images
    tiled = sheet.reshape(rows, columns, channels, height, width).transpose(2, 0, 3, 1, 4)
    return data_address(np.ascontiguousarray(tiled.reshape(channels, rows * height, columns * width)))


def heat_map(margins: NDArray[np.float64], limit: float) -> str:
    """Margins as colours: orange where nothing is proven, else blue, fullest at +-limit; NaN is grey."""
    return data_address(np.moveaxis(margin_colours(margins, limit), -1, 0))


def margin_colours(margins: NDArray[np.float64], limit: float) -> Pixels:
    """RGB (..., 3) of margins; the colour jumps at zero, so that proven and unproven never look alike."""
    if limit <= 0:
        raise InvalidInput(f"the limit of a heat map must be positive, got {limit}")
    share = np.clip(np.nan_to_num(margins) / limit, -1, 1)
    colours = np.where((share > 0)[..., None], _ramp(PROVEN, share), _ramp(UNPROVEN, share + 1))
    colours = np.where(np.isnan(margins)[..., None], np.array(NOWHERE), colours)
    return np.rint(colours).astype(np.uint8)


def _ramp(anchors: Sequence[tuple[int, int, int]], share: NDArray[np.float64]) -> NDArray[np.float64]:
    places = np.linspace(0, 1, len(anchors))
    channels = np.array(anchors, dtype=float).T
    return np.stack([np.interp(share, places, channel) for channel in channels], axis=-1)


def _picture(pixels: Pixels) -> Image.Image:
    if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3):
        raise InvalidInput(f"a picture is uint8 (c, h, w) or (h, w), got {pixels.dtype} {pixels.shape}")
    if pixels.ndim == 3 and pixels.shape[0] == 3:
        return Image.fromarray(np.ascontiguousarray(np.moveaxis(pixels, 0, -1)))
    if pixels.ndim == 3 and pixels.shape[0] != 1:
        raise InvalidInput(f"a picture has 1 or 3 channels, got {pixels.shape[0]}")
    return Image.fromarray(np.ascontiguousarray(pixels.reshape(pixels.shape[-2:])))
