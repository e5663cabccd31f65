"""Whether a proof that was computed again says the same as a card, image by image."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from patchcert.evidence import Evidence
from patchcert.zoo.card import Card

SHOWN = 5
WORK = ("memory_budget", "verdicts_only")
"""Settings of how a proof is worked out, which do not decide what is proven."""


def why_not_comparable(card: Card, found: Evidence) -> str:
    """Why evidence answers another question than the card; empty where it answers the same."""
    if found.threat != card.threat:
        return f"the card is about {card.threat}"
    if (found.selection.data, found.selection.split) != (card.data, "test"):
        return f"the card is about the test images of {card.data}"
    own, other = _decisive(card.proof.classifier), _decisive(found.meta["classifier"])
    if own == other:
        return ""
    settings = ", ".join(f"{key}={value}" for key, value in own.items() if key != "name")
    return f"the card's proof is by {own.get('name')}({settings})"


def differences(card: Card, found: Evidence) -> tuple[str, ...]:
    """In what evidence on test images differs from the card, image by image; empty where they match."""
    index, proof = found.columns["index"], card.proof
    if found.total and index[-1] >= proof.images:
        return (f"there are {index[-1] + 1:,} images, on the card {proof.images:,}",)
    sums = found.meta["data"].get("sha256", {})
    files = [name for name, sha256 in card.data_sha256.items() if sums.get(name) != sha256]
    lines = (
        f"the data files differ from those of the card: {', '.join(files)}" if files else "",
        _difference("predicted rightly", found.right_rows, proof.right_marks[index], found),
        _difference("certified", found.columns["certified"], proof.certified_marks[index], found),
    )
    return tuple(line for line in lines if line)


def _decisive(classifier: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in classifier.items() if key not in WORK}


def _difference(word: str, now: NDArray[np.bool_], stated: NDArray[np.bool_], found: Evidence) -> str:
    unequal = np.flatnonzero(now != stated)
    if not unequal.size:
        return ""
    shown = ", ".join(_named(found, row) for row in unequal[:SHOWN].tolist())
    more = f" and {unequal.size - SHOWN:,} more" if unequal.size > SHOWN else ""
    return (
        f"{np.count_nonzero(now):,} of {len(now):,} images are {word}, on the card "
        f"{np.count_nonzero(stated):,}; unequal are {shown}{more}"
    )


def _named(found: Evidence, row: int) -> str:
    """An image, with its margin where there are margins."""
    margin = f" (least margin {found.columns['margin'][row]:+.2g})" if "margin" in found.columns else ""
    return f"{found.columns['index'][row]}{margin}"
