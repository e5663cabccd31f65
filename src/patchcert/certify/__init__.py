"""Every kind of proof, behind one shape: `predict(images)` and `certify(images, labels, threat) -> Certificates`."""

from patchcert.certify.intervals import Certificates as Certificates
from patchcert.certify.intervals import Certifier as Certifier
from patchcert.certify.intervals import IntervalCertifier as IntervalCertifier
from patchcert.certify.intervals import certify as certify
from patchcert.certify.intervals import placement_margins as placement_margins
