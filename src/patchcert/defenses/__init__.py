"""Defenses that come without a proof, or with one about votes: pre-processing, and random ablation."""

from patchcert.defenses.base import Defended as Defended
from patchcert.defenses.base import Defense as Defense
from patchcert.defenses.base import Surrogate as Surrogate
from patchcert.defenses.base import SurrogateModel as SurrogateModel
from patchcert.defenses.search import SearchResult as SearchResult
from patchcert.defenses.search import Trial as Trial
from patchcert.defenses.search import search_defense as search_defense
from patchcert.defenses.search import smoothing_grid as smoothing_grid
from patchcert.defenses.search import watermarking_grid as watermarking_grid
from patchcert.defenses.smoothing import LocalGradientSmoothing as LocalGradientSmoothing
from patchcert.defenses.watermarking import DigitalWatermarking as DigitalWatermarking
