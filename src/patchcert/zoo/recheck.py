"""Whether a proof that was computed anew says the same as a card, image by image."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from patchcert.certificates import Certificates
from patchcert.zoo.card import AnyThreat, Card

SHOWN = 5


def why_not_comparable(card: Card, threat: AnyThreat, data: str, split: str, dtype: str) -> str:
    """Why a proof of this kind says nothing about the card; empty where it does."""
    if threat != card.threat:
        return f"the card is about {card.threat}"
    if (data, split) != (card.data, "test"):
        return f"the card is about the test images of {card.data}"
    return "" if dtype == card.proof.dtype else f"the card's proof is in {card.proof.dtype}"


def differences(card: Card, found: Certificates, data_sha256: Mapping[str, str]) -> tuple[str, ...]:
    """In what the certificates of the first test images differ from the card; empty where they match."""
    total = len(found.labels)
    if total > card.proof.images:
        return (f"there are {total:,} images, on the card {card.proof.images:,}",)
    files = [name for name, sha256 in card.data_sha256.items() if data_sha256.get(name) != sha256]
    data = f"the data files differ from those of the card: {', '.join(files)}" if files else ""
    right = (found.predictions == found.labels).cpu().numpy()
    certified = found.certified.cpu().numpy()
    margins = found.least_margin.double().cpu().numpy()
    lines = (
        data,
        _difference("predicted rightly", right, card.proof.right_marks[:total], margins),
        _difference("certified", certified, card.proof.certified_marks[:total], margins),
    )
    return tuple(line for line in lines if line)


def _difference(word: str, found: NDArray[np.bool_], stated: NDArray[np.bool_], margins: NDArray[Any]) -> str:
    unequal = np.flatnonzero(found != stated)
    if not unequal.size:
        return ""
    shown = ", ".join(f"{at} (least margin {margins[at]:+.2g})" for at in unequal[:SHOWN].tolist())
    more = f" and {unequal.size - SHOWN:,} more" if unequal.size > SHOWN else ""
    return (
        f"{np.count_nonzero(found):,} of {len(found):,} images are {word}, on the card "
        f"{np.count_nonzero(stated):,}; unequal are {shown}{more}"
    )
