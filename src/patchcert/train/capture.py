"""A training step recorded once as a CUDA graph and replayed: small networks no longer wait for launches."""

import logging
from collections.abc import Callable

import torch
from torch import Generator, Tensor

WARM_UP_STEPS = 3

logger = logging.getLogger(__name__)


class CapturedStep:
    """Replays a step for every full batch; the first few and shorter batches are carried out as usual.

    The steps that warm up the device are real steps, and recording does not carry anything out, so that a run
    with a graph does exactly the steps of a run without. All random draws must come from the registered
    generator. If recording fails and `may_fall_back`, the run goes on without a graph.
    """

    def __init__(
        self, step: Callable[[Tensor], None], batch_size: int, generator: Generator, may_fall_back: bool
    ) -> None:
        self.step = step
        self.generator = generator
        self.may_fall_back = may_fall_back
        self.index = torch.zeros(batch_size, dtype=torch.int64, device=generator.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.warm_up_steps = WARM_UP_STEPS
        self.gave_up = False

    def __call__(self, index: Tensor) -> None:
        """One step on the images at these rows."""
        if self.gave_up or len(index) != len(self.index):
            self.step(index)
            return
        self.index.copy_(index)
        with torch.cuda.device(self.index.device):
            if self.warm_up_steps:
                self._warm_up()
                return
            if self.graph is None:
                self._record()
        if self.graph is not None:
            self.graph.replay()
        else:
            self.step(index)

    def _warm_up(self) -> None:
        """A step on another stream, as recording demands, so that libraries set themselves up before it."""
        self.warm_up_steps -= 1
        present = torch.cuda.current_stream(self.index.device)
        aside = torch.cuda.Stream(self.index.device)
        aside.wait_stream(present)
        with torch.cuda.stream(aside):
            self.step(self.index)
        present.wait_stream(aside)

    def _record(self) -> None:
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        try:
            with torch.cuda.graph(graph):
                self.step(self.index)
        except RuntimeError as error:
            if not self.may_fall_back:
                raise
            self.gave_up = True
            logger.warning(
                "the training step could not be recorded as a CUDA graph, so it runs without: %s", error
            )
            return
        self.graph = graph
