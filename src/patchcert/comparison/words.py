"""What evidence calls a classifier and its settings, in the words of the table."""

from collections.abc import Callable, Mapping
from typing import Any

from patchcert.evidence import Evidence
from patchcert.threats import Patch, shapes

Settings = Mapping[str, Any]


def method_words(settings: Settings) -> str:
    """The kind of proof and what decides its cost: rows with the same words differ in their network at most."""
    name = settings["name"]
    words = _METHODS[name](settings) if name in _METHODS else name
    precision = settings.get("precision", "float32")
    return words if precision == "float32" else f"{words}, {precision}"


def patch_words(evidence: Evidence) -> str:
    """The shape of the patch: height and width of a rectangle, else in words."""
    threat = evidence.threat
    if not isinstance(threat, Patch):
        return str(threat)
    return f"{threat.height}x{threat.width}" if threat.is_solid else shapes.describe(threat.stamp)


def placement_words(evidence: Evidence) -> str:
    """Where the patch may be."""
    return str(evidence.threat.rule) if isinstance(evidence.threat, Patch) else "everywhere"


def _intervals(settings: Settings) -> str:
    return {None: "intervals", "linear": "intervals and linear bounds", "split": "intervals, refined"}[
        settings.get("refine")
    ]


def _masks(kind: str) -> Callable[[Settings], str]:
    def words(settings: Settings) -> str:
        masks = settings["masks"]
        rows, columns = masks if isinstance(masks, list) else (masks, masks)
        more = [f"of {settings['patches']} patches"] if settings.get("patches", 1) > 1 else []
        more += ["mirrored"] if settings.get("mirrored") else []
        return ", ".join([kind, f"{rows}x{columns} masks", *more])

    return words


def _bands(settings: Settings) -> str:
    which = {"column": "columns", "row": "rows", "both": "columns and of as many rows"}
    stride = f" at every {settings['stride']}" if settings.get("stride", 1) > 1 else ""
    return f"bands of {settings['width']} {which[settings['orientation']]}{stride}"


def _blocks(settings: Settings) -> str:
    stride = f" at every {settings['stride']}" if settings.get("stride", 1) > 1 else ""
    return f"blocks of {settings['size']}x{settings['size']}{stride}"


_METHODS: Mapping[str, Callable[[Settings], str]] = {
    "IntervalBounds": _intervals,
    "DoubleMasking": _masks("masking"),
    "MaskedDetection": _masks("detection"),
    "BandVotes": _bands,
    "BlockVotes": _blocks,
    "LocalVotes": lambda settings: f"local votes, {settings['aggregation'].replace('-', ' ')}",
    "RandomAblation": lambda settings: f"random ablation, {settings['retained']} pixels kept",
}
