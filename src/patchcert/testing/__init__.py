"""Conformance suites that anybody can run on their own certifier, threat or attack; needs no test framework.

`patchcert.testing.strategies` offers Hypothesis strategies, `patchcert.testing.shapes` a check of the shapes that
signatures state; both are imported only by those who want them.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from patchcert.testing.attacks import ATTACK_CHECKS as ATTACK_CHECKS
    from patchcert.testing.attacks import check_attack as check_attack
    from patchcert.testing.certifiers import CERTIFIER_CHECKS as CERTIFIER_CHECKS
    from patchcert.testing.certifiers import check_certifier as check_certifier
    from patchcert.testing.conformance import CheckResult as CheckResult
    from patchcert.testing.conformance import ConformanceError as ConformanceError
    from patchcert.testing.conformance import ConformanceReport as ConformanceReport
    from patchcert.testing.threats import THREAT_CHECKS as THREAT_CHECKS
    from patchcert.testing.threats import check_threat as check_threat

_HOMES = {
    "attacks": ("ATTACK_CHECKS", "check_attack"),
    "certifiers": ("CERTIFIER_CHECKS", "check_certifier"),
    "conformance": ("CheckResult", "ConformanceError", "ConformanceReport"),
    "threats": ("THREAT_CHECKS", "check_threat"),
}


def __getattr__(name: str) -> object:
    """Import a suite when it is first asked for, so that `shapes` can be installed before any other module."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"patchcert.testing.{home}"), name)
    raise AttributeError(f"module 'patchcert.testing' has no attribute {name!r}")
