"""Draws the pictures of the documents from the product itself: `python docs/making/pictures.py`.

Every picture shows digits and a model that come with the package, and what patchcert computes for them.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn

import patchcert as pc
from patchcert.bounds import trace
from patchcert.certificates.ablation import draw_retained
from patchcert.certificates.band_votes import band_views, block_views
from patchcert.certificates.local_votes import sight
from patchcert.data import Dataset
from patchcert.evidence import Certification, Selection, Subject
from patchcert.report.pictures import (
    CertificateMap,
    Pixels,
    certificate_maps,
    colour_limit,
    margin_colours,
)

FOLDER = Path(__file__).parents[1] / "pictures"
MODEL, THREAT = "mnist-5x5-cnn2", pc.Patch(5)
DIGIT = 0
ZOOM, GAP, LINE = 6, 16, 34
LETTERS = 24
"""In pixels: pictures are shown at a third of their size in narrow windows, where letters must still be read."""
PAPER, INK, HIDDEN, OUTLINE = (255, 255, 255), (40, 44, 52), (146, 158, 196), (214, 84, 22)


def certificate_map(digits: Dataset) -> Image.Image:
    """Digits, and below each its least margin with the middle of the patch at each pixel."""
    model = pc.load(MODEL)
    subject = Subject(
        pc.IntervalBounds(model),
        pc.zoo.card(MODEL).weights_sha256,
        digits,
        Selection(digits.name, limit=60),
        torch.device("cpu"),
    )
    with tempfile.TemporaryDirectory() as folder:
        evidence = Certification(subject, THREAT, Path(folder) / "proof.npz").run()
    maps = certificate_maps(model, digits.test, evidence, count=6)
    limit = colour_limit(maps)
    return in_rows([[captioned(*_digit_and_map(each, limit)) for each in maps]])


def _digit_and_map(found: CertificateMap, limit: float) -> tuple[Image.Image, str]:
    """The digit with the weakest place outlined, above the map of margins, and what it comes to."""
    size = found.image.shape[-1]
    digit = enlarged(np.repeat(found.image[0, :, :, None], 3, axis=2))
    box = found.weakest
    corners = (box.left, box.top, box.left + box.width, box.top + box.height)
    ImageDraw.Draw(digit).rectangle([ZOOM * at for at in corners], outline=OUTLINE, width=3)
    colours = np.full((size, size, 3), 255, dtype=np.uint8)
    margin = (size - found.margins.shape[0]) // 2
    rows, columns = (slice(margin, margin + length) for length in found.margins.shape)
    colours[rows, columns] = margin_colours(found.margins, limit)
    proven = int((found.margins > 0).sum())
    verdict = "proven" if found.certified else f"{proven} of {found.margins.size}"
    return stacked([digit, enlarged(colours)]), verdict


def masks(digits: Dataset) -> Image.Image:
    """A digit behind each mask of a set, which is hidden by one of them wherever a patch lies."""
    image = digits.test.images[DIGIT, 0]
    hidden = pc.masks_covering(THREAT, *image.shape, masks=3).hidden
    tiles = [captioned(shown(image, ~mask), f"mask {number}") for number, mask in enumerate(hidden)]
    return in_rows([tiles[:3], tiles[3:6], tiles[6:]])


def proofs(digits: Dataset) -> Image.Image:
    """What the model is shown, or what is left to it, by each kind of proof."""
    image = digits.test.images[DIGIT, 0]
    height, width = image.shape
    hidden = pc.masks_covering(THREAT, height, width, masks=6).hidden
    under_patch = torch.zeros(height, width, dtype=torch.bool)
    under_patch[10:15, 8:13] = True
    bands = band_views((height, width), 4, "column", wrap=True)
    blocks = block_views((height, width), 10, wrap=True)
    retained = draw_retained(1, height, width, 45, torch.Generator().manual_seed(0))[0].bool()
    network = trace(nn.Sequential(nn.Conv2d(1, 4, 5), nn.ReLU(), nn.Conv2d(4, 10, 5, stride=2)))
    local = sight(network, height, width)[:, 5, 5].view(height, width)
    tiles = {
        "intervals": ~under_patch,
        "masking": ~(hidden[8] | hidden[21]),
        "detection": ~hidden[14],
        "bands": bands[10],
        "blocks": blocks[width * 9 + 9],
        "local votes": local,
        "ablation": retained,
    }
    drawn = [captioned(shown(image, visible), words) for words, visible in tiles.items()]
    return in_rows([drawn[:4], drawn[4:]])


def shown(image: Annotated[Tensor, "h w"], visible: Annotated[Tensor, "h w"]) -> Image.Image:
    """The image in grey, with hidden pixels in a colour that no pixel has."""
    grey = image.numpy()[:, :, None].repeat(3, axis=2)
    return enlarged(np.where(visible.numpy()[:, :, None], grey, np.array(HIDDEN, dtype=np.uint8)))


def enlarged(pixels: Pixels) -> Image.Image:
    """Each pixel as a square."""
    picture = Image.fromarray(np.ascontiguousarray(pixels))
    return picture.resize((picture.width * ZOOM, picture.height * ZOOM), Image.Resampling.NEAREST)


def captioned(picture: Image.Image, words: str) -> Image.Image:
    """The picture with words below it."""
    sheet = Image.new("RGB", (picture.width, picture.height + LINE), PAPER)
    sheet.paste(picture)
    font = ImageFont.load_default(LETTERS)
    ImageDraw.Draw(sheet).text((picture.width / 2, picture.height + 6), words, INK, font, anchor="ma")
    return sheet


def stacked(pictures: Sequence[Image.Image]) -> Image.Image:
    """Pictures of one width, one below the other."""
    height = sum(picture.height for picture in pictures) + GAP * (len(pictures) - 1)
    sheet = Image.new("RGB", (pictures[0].width, height), PAPER)
    top = 0
    for picture in pictures:
        sheet.paste(picture, (0, top))
        top += picture.height + GAP
    return sheet


def in_rows(rows: Sequence[Sequence[Image.Image]]) -> Image.Image:
    """Pictures of one size in rows, with a margin around them."""
    width, height = rows[0][0].size
    across = GAP + max(len(row) for row in rows) * (width + GAP)
    sheet = Image.new("RGB", (across, GAP + len(rows) * (height + GAP)), PAPER)
    for top, row in enumerate(rows):
        for left, picture in enumerate(row):
            sheet.paste(picture, (GAP + left * (width + GAP), GAP + top * (height + GAP)))
    return sheet


PICTURES: Mapping[str, Callable[[Dataset], Image.Image]] = {
    "certificate-map.png": certificate_map,
    "masks.png": masks,
    "proofs.png": proofs,
}


def draw(folder: Path) -> None:
    """Write all pictures into a folder."""
    digits = pc.load_dataset("mnist-mini")
    folder.mkdir(exist_ok=True)
    for name, picture in PICTURES.items():
        picture(digits).save(folder / name, optimize=True)


if __name__ == "__main__":
    draw(FOLDER)
