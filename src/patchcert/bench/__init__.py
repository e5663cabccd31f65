"""How fast bounds and attacks are here: each against the plain way in one run, bounds also against the floor."""

from patchcert.bench.cases import CASES as CASES
from patchcert.bench.cases import Case as Case
from patchcert.bench.measure import AttackRates as AttackRates
from patchcert.bench.measure import Machine as Machine
from patchcert.bench.measure import Measurement as Measurement
from patchcert.bench.measure import run_case as run_case
