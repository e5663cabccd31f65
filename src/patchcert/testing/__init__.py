"""Suites that anybody can run on a certifier, threat, attack or condition on votes of their own; needs no framework."""

from patchcert.testing.attacks import ATTACK_CHECKS as ATTACK_CHECKS
from patchcert.testing.attacks import check_attack as check_attack
from patchcert.testing.certifiers import CERTIFIER_CHECKS as CERTIFIER_CHECKS
from patchcert.testing.certifiers import check_certifier as check_certifier
from patchcert.testing.conformance import ConformanceError as ConformanceError
from patchcert.testing.conformance import ConformanceReport as ConformanceReport
from patchcert.testing.threats import THREAT_CHECKS as THREAT_CHECKS
from patchcert.testing.threats import check_threat as check_threat
from patchcert.testing.votes import VOTE_CHECKS as VOTE_CHECKS
from patchcert.testing.votes import check_votes as check_votes
