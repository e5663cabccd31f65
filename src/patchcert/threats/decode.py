"""From plain types, as they stand in specifications and evidence, back to a threat."""

from collections.abc import Mapping

from patchcert.errors import InvalidThreat
from patchcert.threats.patch import Patch
from patchcert.threats.sparse import SparsePixels
from patchcert.threats.threat import Plain

KINDS: dict[str, type[Patch] | type[SparsePixels]] = {"patch": Patch, "sparse": SparsePixels}


def threat_from_dict(plain: Mapping[str, Plain]) -> Patch | SparsePixels:
    """The threat whose `to_dict` is the given table."""
    kind = plain.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise InvalidThreat(f"unknown kind of threat {kind!r}", hint=f"choose one of {', '.join(KINDS)}")
    return KINDS[kind].from_dict(plain)
