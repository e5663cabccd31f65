"""Defenses that change images before a classifier sees them, and come without a proof."""

from patchcert.defenses.preprocessing import Defended as Defended
from patchcert.defenses.preprocessing import Defense as Defense
from patchcert.defenses.smoothing import LocalGradientSmoothing as LocalGradientSmoothing
from patchcert.defenses.watermarking import DigitalWatermarking as DigitalWatermarking
