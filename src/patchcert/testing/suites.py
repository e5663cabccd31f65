"""The suites as one call each."""

from collections.abc import Callable, Sequence

from patchcert.errors import PatchcertError
from patchcert.testing.attack_checks import ATTACK_CHECKS, AttackLike, AttackUnderTest
from patchcert.testing.certifier import CertifierUnderTest, Certify
from patchcert.testing.certifier_manners import MANNERS
from patchcert.testing.certifier_soundness import SOUNDNESS
from patchcert.testing.report import ConformanceReport, run_checks
from patchcert.testing.threat_checks import THREAT_CHECKS, ThreatUnderTest
from patchcert.threats import Threat

CERTIFIER_CHECKS: tuple[Callable[[CertifierUnderTest], None], ...] = (*SOUNDNESS, *MANNERS)


def check_certifier(
    certify: Certify,
    *,
    variants: Sequence[Certify] = (),
    bounds_margins: bool = True,
    sparse: bool = False,
    refusals: tuple[type[Exception], ...] = (PatchcertError, NotImplementedError),
    device: str = "cpu",
    checks: Sequence[Callable[[CertifierUnderTest], None]] = CERTIFIER_CHECKS,
) -> ConformanceReport:
    """Raise a ConformanceError unless `certify(model, images, labels, threat)` keeps a certifier's promises.

    `variants` are the same certifier with other settings, which must agree with it. Certifiers whose margins
    are no bounds on logit differences say so with `bounds_margins=False`; those that know sparse pixels ask
    for these checks with `sparse=True`. `refusals` are the errors by which a model is
    declined; as that is always sound, the suite does not ask which layers a certifier knows.
    """
    subject = CertifierUnderTest(certify, tuple(variants), bounds_margins, sparse, refusals, device)
    return run_checks(f"certifier {getattr(certify, '__name__', type(certify).__name__)}", subject, checks)


def check_threat(
    threat: Threat,
    *,
    shape: tuple[int, int, int] = (3, 6, 7),
    device: str = "cpu",
    checks: Sequence[Callable[[ThreatUnderTest], None]] = THREAT_CHECKS,
) -> ConformanceReport:
    """Raise a ConformanceError unless the threat keeps its promises on images of this (c, h, w) shape."""
    return run_checks(f"threat {threat}", ThreatUnderTest(threat, shape, device), checks)


def check_attack(
    attack: AttackLike,
    *,
    sparse: bool = False,
    device: str = "cpu",
    checks: Sequence[Callable[[AttackUnderTest], None]] = ATTACK_CHECKS,
) -> ConformanceReport:
    """Raise a ConformanceError unless the attack keeps its promises; `sparse` if it attacks SparsePixels.

    A few steps and restarts are enough to pass, and keep the suite fast.
    """
    return run_checks(f"attack {attack}", AttackUnderTest(attack, sparse, device), checks)
