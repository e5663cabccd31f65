"""Times the stages of refinement: `OMP_NUM_THREADS=1 python docs/making/refinement_stages.py`, on all test images.

Intervals, the search for counterexamples, linear bounds and branch and bound each see only what the ones before have
left open.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import patchcert as pc
from patchcert.certificates import intervals, refinement

FILE = Path(__file__).parents[1] / "measurements" / "refinement-stages.json"
MODELS = ("mnist-2x2-mlp", "mnist-2x2-cnn2", "mnist-5x5-mlp", "mnist-5x5-cnn2")
STAGES = {
    "intervals": (intervals._Proof, "margins"),
    "search": (refinement._Work, "search"),
    "linear": (refinement._Work, "bound"),
    "split": (refinement._Work, "split"),
}
NOTE = (
    "Models of the zoo, certified by `pc.IntervalBounds(model, refine='split')` on all test images of MNIST: for each "
    "stage the `images` that it had to look at, and the seconds of one thread that its calls took."
)


@contextmanager
def timed(stage: str, found: dict[str, dict[str, Any]]) -> Iterator[None]:
    """Inside, calls of a stage are counted and timed."""
    owner, name = STAGES[stage]
    call: Callable[..., Any] = getattr(owner, name)
    found[stage] = {"images": 0, "seconds": 0.0}

    def measured(self: Any, *given: Any) -> Any:  # noqa: ANN401 - whatever the stage takes and gives
        is_first = stage == "intervals"
        left = self.is_sound[given[0]] if is_first else self.open().flatten(1).any(dim=1)
        start = time.process_time()
        result = call(self, *given)
        found[stage]["seconds"] += time.process_time() - start
        found[stage]["images"] += len(left) if is_first else int(left.sum())
        return result

    with patch.object(owner, name, measured):
        yield


def measure(name: str, images: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
    """What each stage took for one model of the zoo, and what came of it."""
    card, stages = pc.zoo.card(name), dict[str, dict[str, Any]]()
    with ExitStack() as stack:
        for stage in STAGES:
            stack.enter_context(timed(stage, stages))
        start = time.process_time()
        found = pc.IntervalBounds(pc.load(name), refine="split").certify(images, labels, card.threat)
        seconds = time.process_time() - start
    counts = {each: int(getattr(found, each).sum()) for each in ("certified", "broken", "open")}
    return {"images": len(images), **counts, "seconds": seconds, "stages": stages}


if __name__ == "__main__":
    test = pc.load_dataset("mnist").test
    models = {name: measure(name, test.floats(), test.labels) for name in MODELS}
    content = {
        "note": NOTE,
        "command": "OMP_NUM_THREADS=1 python docs/making/refinement_stages.py",
        "threads": torch.get_num_threads(),
        "models": models,
    }
    rounded = json.loads(json.dumps(content), parse_float=lambda text: round(float(text), 1))
    FILE.write_text(json.dumps(rounded, indent=1) + "\n", encoding="utf-8")
