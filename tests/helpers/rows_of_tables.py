"""Runs behind rows of the paper's tables, as if they had been counted."""

from dataclasses import replace

from patchcert.papers.chiang2020.counting import CountedRun
from patchcert.report.statistics import Proportion
from patchcert.threats import Patch
from patchcert.train.spec import read_spec


def counted_run(certified, seed=2019, loss=None, tf32=False):
    """The paper's mlp on MNIST with this many images of 10,000 proven against a 5x5 patch."""
    spec = replace(read_spec("paper-mnist"), seed=seed)
    spec = replace(spec, optimiser=replace(spec.optimiser, tf32=tf32))
    clean, proven = Proportion(9401, 10_000), ((Patch(5), Proportion(certified, 10_000)),)
    return CountedRun("f" * 16, spec, clean, proven, 55.4, "NVIDIA H200", training_loss=loss)
