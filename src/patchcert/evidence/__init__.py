"""Evidence, one row per image: asked for as a question, measured in one way, kept in one format, counted ever after."""

from typing import TYPE_CHECKING

from patchcert.evidence.record import Evidence as Evidence
from patchcert.evidence.record import EvidenceFolder as EvidenceFolder
from patchcert.evidence.record import Question as Question
from patchcert.evidence.record import Selection as Selection
from patchcert.evidence.record import refuted as refuted

if TYPE_CHECKING:
    from patchcert.evidence.measuring import Attacking as Attacking
    from patchcert.evidence.measuring import Certification as Certification
    from patchcert.evidence.measuring import Subject as Subject


def __getattr__(name: str) -> object:
    """What measures loads attacks and defenses, which counting does without: only when it is first asked for."""
    if name not in ("Attacking", "Certification", "Subject"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from patchcert.evidence import measuring

    return getattr(measuring, name)
