"""What an attacker may do to an image. Knows nothing of networks."""

from collections.abc import Mapping

from patchcert.errors import InvalidThreat
from patchcert.threats import shapes as shapes
from patchcert.threats.patch import Patch as Patch
from patchcert.threats.placements import Placements as Placements
from patchcert.threats.sparse import SparsePixels as SparsePixels
from patchcert.threats.threat import Plain as Plain
from patchcert.threats.threat import Threat as Threat

_KINDS: dict[str, type[Patch] | type[SparsePixels]] = {"patch": Patch, "sparse": SparsePixels}


def threat_from_dict(plain: Mapping[str, Plain]) -> Patch | SparsePixels:
    """The threat whose `to_dict` is the given table."""
    kind = plain.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise InvalidThreat(f"unknown kind of threat {kind!r}", hint=f"choose one of {', '.join(_KINDS)}")
    return _KINDS[kind].from_dict(plain)
