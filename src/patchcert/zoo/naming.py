"""What a model of the zoo is called: data set, threat, architecture."""

import hashlib
import json
import re

from patchcert.threats import Patch, SparsePixels, shapes
from patchcert.train.spec import Spec


def entry_name(spec: Spec) -> str:
    """Like `mnist-5x5-mlp`; runs that differ in width, strategy, schedule or seed share the name."""
    return "-".join(map(_slug, (spec.data.name, threat_word(spec.threat), spec.model.name)))


def threat_word(threat: Patch | SparsePixels) -> str:
    """A rectangle that may be anywhere is its size; whatever words do not tell apart gets a digest."""
    if isinstance(threat, SparsePixels):
        bound = "" if threat.bound == "tight" else f"-{threat.bound}"
        return f"{threat.pixels}-pixel{'s' if threat.pixels > 1 else ''}{bound}"
    stamp = f"{threat.height}x{threat.width}" if threat.is_solid else shapes.describe(threat.stamp)
    rule = str(threat.rule)
    where = "" if rule == "everywhere" else f"-{rule}"
    is_spelt_out = threat.is_solid and rule in ("everywhere", "corners")
    return f"{stamp}{where}" if is_spelt_out else f"{stamp}{where}-{_digest(threat)}"


def _digest(threat: Patch) -> str:
    return hashlib.sha256(json.dumps(threat.to_dict(), sort_keys=True).encode()).hexdigest()[:8]


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
