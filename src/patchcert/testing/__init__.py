"""Conformance suites that anybody can run on their own certifier, threat or attack; needs no test framework.

`patchcert.testing.strategies` offers Hypothesis strategies, `patchcert.testing.shapes` a check of the shapes that
signatures state; both are imported only by those who want them.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from patchcert.testing.attack_checks import ATTACK_CHECKS
    from patchcert.testing.report import CheckResult, ConformanceError, ConformanceReport
    from patchcert.testing.suites import CERTIFIER_CHECKS, check_attack, check_certifier, check_threat
    from patchcert.testing.threat_checks import THREAT_CHECKS

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
    "ATTACK_CHECKS": "attack_checks",
    "CERTIFIER_CHECKS": "suites",
    "THREAT_CHECKS": "threat_checks",
    "CheckResult": "report",
    "ConformanceError": "report",
    "ConformanceReport": "report",
    "check_attack": "suites",
    "check_certifier": "suites",
    "check_threat": "suites",
}


def __getattr__(name: str) -> object:
    """Import a suite when it is first asked for, so that `shapes` can be installed before any other module."""
    if name not in _HOMES:
        raise AttributeError(f"module 'patchcert.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(f"patchcert.testing.{_HOMES[name]}"), name)
