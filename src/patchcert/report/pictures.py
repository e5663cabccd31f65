"""Images on a page: PNG data addresses, certificate maps, images behind masks, and images that an attack broke.

One file pixel per image pixel; the page enlarges them.
"""

import base64
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from patchcert.bounds.network import least_over_others
from patchcert.certificates import Certificates, Classifier, IntervalBounds, method_named
from patchcert.certificates.masking import DoubleMasking
from patchcert.data import Split
from patchcert.errors import InvalidInput
from patchcert.evidence import Evidence
from patchcert.threats import Patch, SparsePixels, threat_from_dict
from patchcert.threats.masks import MaskSet, masks_covering

Pixels = NDArray[np.uint8]

UNPROVEN = ((122, 36, 4), (214, 84, 22), (246, 178, 132), (247, 240, 232))
PROVEN = ((228, 238, 246), (138, 188, 226), (42, 122, 190), (8, 62, 122))
NOWHERE = (128, 128, 128)
WITH_MARGINS = (IntervalBounds, DoubleMasking)
"""Kinds of proof whose maps show by how much a placement is proven; maps of others show only whether it is."""
COPIES_FOR_MAPS = 6000
"""Forward passes that a page may spend on maps of proofs by masks: some seconds on a CPU for small networks."""


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


@dataclass(frozen=True)
class Box:
    """A rectangle of pixels."""

    top: int
    left: int
    height: int
    width: int


@dataclass(frozen=True, eq=False)
class CertifiedImage:
    """An image of evidence, with what was found of it."""

    index: int
    image: Pixels
    label: int
    prediction: int
    certified: bool

    @property
    def verdict(self) -> str:
        """One of: certified, not certified, wrong, abstained."""
        if self.certified:
            return "certified"
        if self.prediction == self.label:
            return "not certified"
        return "abstained" if self.prediction < 0 else "wrong"


@dataclass(frozen=True, eq=False)
class CertificateMap(CertifiedImage):
    """An image with its least margin at every placement of the patch; NaN where no placement is allowed.

    For double masking it is the lead beyond the slack. Other kinds of proof have no margins (`has_margins`): it is
    then 1 where a placement is proven, else -1.
    """

    patch: Patch
    margins: NDArray[np.float64]
    has_margins: bool = True

    @property
    def weakest(self) -> Box:
        """The placement with the least margin."""
        top, left = np.unravel_index(int(np.nanargmin(self.margins)), self.margins.shape)
        return Box(int(top), int(left), self.patch.height, self.patch.width)

    @property
    def least(self) -> float:
        """The margin at the weakest placement."""
        return float(np.nanmin(self.margins))


@dataclass(frozen=True, eq=False)
class PlacedImage(CertifiedImage):
    """An image, and the placement of the patch with the least margin, as far as rows of evidence tell."""

    weakest: Box
    least: float


@dataclass(frozen=True, eq=False)
class MaskedImage(CertifiedImage):
    """An image, and its copy behind the masks where the label's lead was least of all copies that were looked at."""

    copy: Pixels
    lead: float
    masks: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class AttackedImage:
    """An image that was right before an attack and wrong after it, and the boxes that hold everything it changed."""

    index: int
    clean: Pixels
    attacked: Pixels
    label: int
    after: int
    boxes: tuple[Box, ...]

    @property
    def patch(self) -> Pixels | None:
        """The patch by itself, where there is just one box."""
        if len(self.boxes) != 1:
            return None
        box = self.boxes[0]
        rows, columns = slice(box.top, box.top + box.height), slice(box.left, box.left + box.width)
        return np.ascontiguousarray(self.attacked[:, rows, columns])


def colour_limit(maps: Sequence[CertificateMap]) -> float:
    """The margin at which colours are fullest: the middle map's largest, so that no map dims all others."""
    largest = sorted(float(np.nanmax(np.abs(sample.margins))) for sample in maps)
    limit = largest[len(largest) // 2] if largest else 0.0
    return limit if 0 < limit < math.inf else 1.0


def certificate_maps(model: nn.Module, images: Split, rows: Evidence, count: int) -> list[CertificateMap]:
    """The maps of `count` telling rows, or of as few as can be proven again in some seconds."""
    threat, classifier = rows.threat, _classifier(model, rows)
    if classifier is None or not isinstance(threat, Patch):
        return []
    chosen = telling_rows(rows, min(count, _affordable(classifier, images)))
    if not len(chosen):
        return []
    columns = {name: rows.columns[name][chosen] for name in ("index", "label", "prediction", "certified")}
    return _maps(classifier, images[torch.from_numpy(columns["index"]).long()], threat, columns)


def certificate_map(
    classifier: Classifier, image: Split, found: Certificates, threat: Patch
) -> CertificateMap | None:
    """The map of one image and its certificate; None where the kind of proof has none."""
    if not isinstance(classifier, WITH_MARGINS) and found.placements is None:
        return None
    verdict = {"label": found.labels, "prediction": found.predictions, "certified": found.certified}
    columns = {name: value.cpu().numpy() for name, value in verdict.items()}
    return _maps(classifier, image, threat, {"index": np.zeros(1, np.int64), **columns})[0]


def _maps(
    classifier: Classifier, images: Split, threat: Patch, columns: Mapping[str, NDArray[Any]]
) -> list[CertificateMap]:
    """The maps of all images, whose columns of evidence these are."""
    grids = _grids(_placement_margins(classifier, images, threat), threat, images.image_size)
    return [
        CertificateMap(
            **_row(columns, at),
            image=images.images[at].cpu().numpy(),
            patch=threat,
            margins=grids[at],
            has_margins=isinstance(classifier, WITH_MARGINS),
        )
        for at in range(len(images))
    ]


def _row(columns: Mapping[str, NDArray[Any]], at: int) -> dict[str, Any]:
    """What evidence says of an image."""
    return {name: columns[name][at].item() for name in ("index", "label", "prediction", "certified")}


def _classifier(model: nn.Module, rows: Evidence) -> Classifier | None:
    """The classifier that was certified; None where its certificates have no map."""
    description = rows.meta["classifier"]
    method = method_named(description["name"])
    has_map = rows.guarantee.is_deterministic and description.get("patches", 1) == 1
    return method.described(model, description) if method is not None and has_map else None


def _affordable(classifier: Classifier, images: Split) -> int:
    """How many images can be mapped with COPIES_FOR_MAPS forward passes."""
    if not isinstance(classifier, DoubleMasking):
        return len(images)
    masks = len(classifier.mask_set(*images.image_size[1:]))
    return COPIES_FOR_MAPS // (masks * (masks + 1) // 2)


def _placement_margins(classifier: Classifier, split: Split, threat: Patch) -> Annotated[Tensor, "n p"]:
    """What is above 0 where a placement is proven."""
    images, labels = split.floats(), split.labels
    if isinstance(classifier, IntervalBounds):
        return least_over_others(classifier.placement_margins(images, labels, threat), labels[:, None]).cpu()
    if isinstance(classifier, DoubleMasking):
        return (classifier.placement_leads(images, labels, threat) - classifier.needed_lead).cpu()
    proven = classifier.certify(images, labels, threat).placements
    assert proven is not None
    return torch.where(proven, 1.0, -1.0).cpu()


def placed_images(images: Split, rows: Evidence, count: int) -> list[PlacedImage]:
    """`count` telling rows, each with its weakest placement; none of proofs whose rows have no placement."""
    patch, columns = rows.threat, rows.columns
    if not isinstance(patch, Patch) or "worst_top" not in columns:
        return []
    found = []
    for row in telling_rows(rows, count).tolist():
        told = _row(columns, row)
        top, left, least = (columns[name][row].item() for name in ("worst_top", "worst_left", "margin"))
        box, image = Box(top, left, patch.height, patch.width), images.images[told["index"]].numpy()
        found.append(PlacedImage(**told, image=image, weakest=box, least=least))
    return found


def masked_images(images: Split, rows: Evidence, count: int) -> list[MaskedImage]:
    """`count` telling rows of a proof by masks, each with its weakest copy; none of other kinds of proof."""
    masks = masks_of(rows, images)
    if masks is None:
        return []
    found = []
    for row in telling_rows(rows, count).tolist():
        told = _row(rows.columns, row)
        image = images.images[told["index"]].numpy()
        lead, *pair = (rows.columns[name][row].item() for name in ("lead", "first_mask", "second_mask"))
        copy = behind(masks.hidden[pair].any(dim=0), image, rows.meta["classifier"]["fill"])
        found.append(MaskedImage(**told, image=image, copy=copy, lead=lead, masks=tuple(sorted(set(pair)))))
    return found


def masks_of(rows: Evidence, images: Split) -> MaskSet | None:
    """The masks of a proof by masks; None of other kinds of proof."""
    if "first_mask" not in rows.columns:
        return None
    kind, (_, height, width) = rows.meta["classifier"], images.image_size
    threat = threat_from_dict(kind["masked_threat"])
    assert not isinstance(threat, SparsePixels)
    masks = kind["masks"] if isinstance(kind["masks"], int) else tuple(kind["masks"])
    return masks_covering(threat, height, width, masks)


def behind(hidden: Annotated[Tensor, "h w"], image: Pixels, fill: float | Sequence[float]) -> Pixels:
    """The image as the model is shown it, hidden pixels at the fill of the proof."""
    shown = np.rint(255 * np.clip(np.atleast_1d(fill), 0, 1)).astype(np.uint8)
    return np.where(hidden.cpu().numpy(), shown[:, None, None], image)


def telling_rows(rows: Evidence, count: int) -> NDArray[np.intp]:
    """Rows over the whole range of margins or leads: proofs, then images right but not proven, then wrong ones.

    Half of the rows are certified and half are not, as far as there are enough of either; wrong ones fill what the
    others leave. Each group goes from the widest to the narrowest; without margins and leads it is spread over the
    images in their order.
    """
    columns = rows.columns
    widths = columns.get("margin", columns.get("lead", np.zeros(rows.total)))
    order = np.argsort(-widths, kind="stable")
    certified, right = columns["certified"][order], (columns["prediction"] == columns["label"])[order]
    proven, unproven, wrong = order[certified], order[right & ~certified], order[~right & ~certified]
    failures = min(len(unproven) + len(wrong), max(count // 2, count - len(proven)))
    unproven = _spread(unproven, failures)
    return np.concatenate(
        [_spread(proven, count - failures), unproven, _spread(wrong, failures - len(unproven))]
    )


def attacked_images(images: Split, attacks: Sequence[Evidence], count: int) -> list[AttackedImage]:
    """The first `count` images that were right and that an attack has broken, as far as they were kept."""
    found: dict[int, AttackedImage] = {}
    for rows in attacks:
        kept = rows.adversarial()
        broken = rows.broken_rows & rows.right_rows
        for row in np.flatnonzero(broken).tolist():
            index = int(rows.columns["index"][row])
            if index in kept and index not in found:
                clean, attacked = images.images[index].numpy(), np.rint(255 * kept[index]).astype(np.uint8)
                label, after = (int(rows.columns[name][row]) for name in ("label", "prediction_after"))
                boxes = _boxes(rows, row, clean, attacked)
                found[index] = AttackedImage(index, clean, attacked, label, after, boxes)
    return [found[index] for index in sorted(found)][:count]


def _boxes(rows: Evidence, row: int, clean: Pixels, attacked: Pixels) -> tuple[Box, ...]:
    """The patch where it lies; for a threat without placements every changed pixel."""
    top, left = int(rows.columns["top"][row]), int(rows.columns["left"][row])
    if isinstance(rows.threat, Patch) and top >= 0:
        return (Box(top, left, rows.threat.height, rows.threat.width),)
    changed = np.argwhere((clean != attacked).any(axis=0)).tolist()
    return tuple(Box(top, left, 1, 1) for top, left in changed)


def _spread(ordered: NDArray[np.intp], count: int) -> NDArray[np.intp]:
    """`count` entries at even distances, the first and the last among them; all where there are fewer."""
    if len(ordered) <= count:
        return ordered
    return ordered[np.linspace(0, len(ordered) - 1, count).round().astype(int)]


def _grids(least: Annotated[Tensor, "n p"], threat: Patch, size: tuple[int, int, int]) -> NDArray[np.float64]:
    """The margins (n, rows, columns) by top-left corner; NaN where the patch may not be."""
    _, height, width = size
    grid = np.full((len(least), height - threat.height + 1, width - threat.width + 1), np.nan)
    top, left = threat.placements(height, width).corners.T.numpy()
    grid[:, top, left] = least.double().numpy()
    return grid
