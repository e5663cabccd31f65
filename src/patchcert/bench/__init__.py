"""How fast bounds are here: the engine against the dense way in one run, and against the floor of the device."""

from patchcert.bench.cases import CASES as CASES
from patchcert.bench.cases import Case as Case
from patchcert.bench.measure import Machine as Machine
from patchcert.bench.measure import Measurement as Measurement
from patchcert.bench.measure import run_case as run_case
