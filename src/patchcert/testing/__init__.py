"""Conformance suites that anybody can run on their own certifier, threat or attack; needs no test framework.

`patchcert.testing.strategies` offers Hypothesis strategies, `patchcert.testing.shapes` a check of the shapes that
signatures state; both are imported only by those who want them.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from patchcert.testing.attacks import ATTACK_CHECKS, check_attack
    from patchcert.testing.certifiers import CERTIFIER_CHECKS, check_certifier
    from patchcert.testing.conformance import CheckResult, ConformanceError, ConformanceReport
    from patchcert.testing.threats import THREAT_CHECKS, check_threat

__all__ = [
    "ATTACK_CHECKS",
    "CERTIFIER_CHECKS",
    "THREAT_CHECKS",
    "CheckResult",
    "ConformanceError",
    "ConformanceReport",
    "check_attack",
    "check_certifier",
    "check_threat",
]

_HOMES = {
    "ATTACK_CHECKS": "attacks",
    "CERTIFIER_CHECKS": "certifiers",
    "THREAT_CHECKS": "threats",
    "CheckResult": "conformance",
    "ConformanceError": "conformance",
    "ConformanceReport": "conformance",
    "check_attack": "attacks",
    "check_certifier": "certifiers",
    "check_threat": "threats",
}


def __getattr__(name: str) -> object:
    """Import a suite when it is first asked for, so that `shapes` can be installed before any other module."""
    if name not in _HOMES:
        raise AttributeError(f"module 'patchcert.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(f"patchcert.testing.{_HOMES[name]}"), name)
