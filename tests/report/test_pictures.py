"""Images as data addresses, and which of them a page shows."""

import base64
import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from patchcert.certificates.masking import DoubleMasking
from patchcert.data import Split, load_dataset
from patchcert.errors import InvalidInput
from patchcert.evidence import Question, Selection, Subject
from patchcert.evidence.measuring import certificate_columns
from patchcert.models import ModelSpec, build
from patchcert.report.pictures import (
    NOWHERE,
    PROVEN,
    UNPROVEN,
    certificate_maps,
    data_address,
    margin_colours,
    masked_images,
    sprite,
    telling_rows,
)
from patchcert.threats import Patch
from patchcert.threats.masks import masks_covering


def decode(address: str) -> np.ndarray:
    head, body = address.split(",")
    assert head == "data:image/png;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(body))))


def test_pixels_come_back_unchanged_in_grey_and_colour():
    pixels = np.random.default_rng(0).integers(0, 256, (3, 5, 7), dtype=np.uint8)
    assert (decode(data_address(pixels)) == pixels.transpose(1, 2, 0)).all()
    assert (decode(data_address(pixels[:1])) == pixels[0]).all()
    assert data_address(pixels) == data_address(pixels.copy())


def test_a_sprite_holds_every_image_at_its_place():
    images = np.random.default_rng(1).integers(0, 256, (7, 1, 4, 5), dtype=np.uint8)
    sheet = decode(sprite(images, columns=3))
    assert sheet.shape == (12, 15)
    for number, image in enumerate(images):
        row, column = divmod(number, 3)
        assert (sheet[4 * row : 4 * row + 4, 5 * column : 5 * column + 5] == image[0]).all()


def test_colours_tell_proven_from_unproven_and_unknown():
    margins = np.array([-2.0, 0.0, 1e-9, 2.0, np.nan, -np.inf])
    colours = [tuple(colour.tolist()) for colour in margin_colours(margins, 2.0)]
    assert colours == [UNPROVEN[0], UNPROVEN[-1], PROVEN[0], PROVEN[-1], NOWHERE, UNPROVEN[0]]


def test_a_scale_without_extent_is_refused():
    with pytest.raises(InvalidInput, match=r"must be positive, got 0\.0"):
        margin_colours(np.zeros(1), 0.0)


@pytest.mark.parametrize("bad", [np.zeros((2, 4, 4), np.uint8), np.zeros((4, 4)), np.zeros(4, np.uint8)])
def test_what_is_no_picture_is_refused(bad):
    with pytest.raises(InvalidInput, match="a picture"):
        data_address(bad)


@pytest.mark.parametrize(("count", "proven"), [(4, 2), (8, 5), (40, 5)])
@pytest.mark.parametrize("has_margins", [True, False])
def test_half_of_the_telling_rows_are_certified_where_there_are_enough(
    run, changed, count, proven, has_margins
):
    rows = {name: column[:8] for name, column in run.certificates[0].columns.items()}
    few = replace(run.certificates[0], columns=rows | {"certified": rows["index"] < 5})
    few = few if has_margins else changed(few, margin=None)
    chosen = telling_rows(few, count)
    assert len(set(chosen.tolist())) == len(chosen) == min(count, 8)
    assert few.columns["certified"][chosen].sum() == proven


def test_images_that_are_right_come_before_wrong_ones(run):
    rows = run.certificates[0]
    right = rows.columns["prediction"] == rows.columns["label"]
    wide = replace(rows, columns=rows.columns | {"margin": np.where(right, rows.columns["margin"], -0.1)})
    few, all_of_them = telling_rows(wide, 8), telling_rows(wide, 40)
    assert right[few].all()
    assert right[all_of_them[:36]].all()
    assert all_of_them[28:].tolist() == [*range(28, 40)]


def test_maps_of_masks_show_what_is_proven_again():
    images = load_dataset("mnist-mini").test.take(6)
    model = build(ModelSpec("mlp", 1, 28, 28, hidden=8), torch.Generator().manual_seed(1)).eval()
    threat = Patch(3)
    masking = DoubleMasking(model, threat, masks=3)
    labels = masking.predict(images.floats())
    split = Split(images.images, labels)
    found = masking.certify(split.floats(), labels, threat)
    dataset = replace(load_dataset("mnist-mini"), test=split)
    subject = Subject(masking, "0" * 64, dataset, Selection("mnist-mini"), torch.device("cpu"))
    rows = subject.evidence(
        Question("certify", threat, Selection("mnist-mini"), masking.describe()),
        certificate_columns(found, torch.arange(6)),
        {"guarantee": {"promise": "recovery", "confidence": 1.0}},
    )
    maps = certificate_maps(model, split, rows, 4)
    assert len(maps) == 4
    for each in maps:
        assert bool((each.margins > 0).all()) == each.certified == bool(found.certified[each.index])


def test_proofs_by_masks_show_the_weakest_copy(run, masked_run):
    (rows,) = masked_run.certificates
    images = Split(torch.from_numpy(run.thumbnails), torch.from_numpy(rows.columns["label"]))
    shown = {each.index: each for each in masked_images(images, rows, 40)}
    assert len(shown) == 40
    hidden = masks_covering(Patch(2), 12, 12, masks=3).hidden.numpy()
    for index, pair in ((29, (0, 4)), (3, (2,))):
        found = shown[index]
        behind = hidden[list(pair)].any(axis=0)
        assert found.masks == pair
        assert (found.copy[0][behind] == 0).all()
        assert (found.copy[0][~behind] == run.thumbnails[index, 0][~behind]).all()
    assert (shown[29].certified, shown[29].lead) == (False, -0.5)
    assert masked_images(images, run.certificates[0], 8) == []
