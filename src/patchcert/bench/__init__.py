"""How fast bounds and attacks are on this machine, against the plain way of the same run and, for bounds, the floor."""

from patchcert.bench.masking import MASKED_CASES as MASKED_CASES
from patchcert.bench.masking import MaskedCase as MaskedCase
from patchcert.bench.masking import run_masked_case as run_masked_case
from patchcert.bench.measure import CASES as CASES
from patchcert.bench.measure import SIZES as SIZES
from patchcert.bench.measure import Case as Case
from patchcert.bench.measure import Machine as Machine
from patchcert.bench.measure import run_case as run_case
from patchcert.bench.votes import VOTES_CASES as VOTES_CASES
from patchcert.bench.votes import VotesCase as VotesCase
from patchcert.bench.votes import run_votes_case as run_votes_case

AnyCase = Case | MaskedCase | VotesCase
