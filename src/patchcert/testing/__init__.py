"""Conformance suites that anybody can run on their own certifier, threat or attack; needs no test framework.

`patchcert.testing.strategies` offers Hypothesis strategies and is imported only by those who want them.
"""

from patchcert.testing.attack_checks import ATTACK_CHECKS as ATTACK_CHECKS
from patchcert.testing.report import CheckResult as CheckResult
from patchcert.testing.report import ConformanceError as ConformanceError
from patchcert.testing.report import ConformanceReport as ConformanceReport
from patchcert.testing.suites import CERTIFIER_CHECKS as CERTIFIER_CHECKS
from patchcert.testing.suites import check_attack as check_attack
from patchcert.testing.suites import check_certifier as check_certifier
from patchcert.testing.suites import check_threat as check_threat
from patchcert.testing.threat_checks import THREAT_CHECKS as THREAT_CHECKS
