"""Evidence, one row per image: asked for as a question, measured in one way, kept in one format, counted ever after."""

from patchcert.evidence.measuring import Attacking as Attacking
from patchcert.evidence.measuring import Certification as Certification
from patchcert.evidence.measuring import Subject as Subject
from patchcert.evidence.record import Evidence as Evidence
from patchcert.evidence.record import EvidenceFolder as EvidenceFolder
from patchcert.evidence.record import Question as Question
from patchcert.evidence.record import Selection as Selection
from patchcert.evidence.record import refuted as refuted
