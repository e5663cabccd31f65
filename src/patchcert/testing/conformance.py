"""What the suites share: checks are small functions whose name is their claim; a report lists which of them held."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Generator, Tensor, nn

Subject = TypeVar("Subject")


class ConformanceError(AssertionError):
    """Something under test broke a promise; the message says which, and on what input."""


@dataclass(frozen=True)
class ConformanceReport:
    """The names of all checks that ran, in order, and by the name of each that did not hold what was found."""

    subject: str
    names: tuple[str, ...]
    failures: dict[str, str]

    def __str__(self) -> str:
        held = len(self.names) - len(self.failures)
        lines = [f"{self.subject}: {held} of {len(self.names)} checks hold"]
        for name in self.names:
            lines.append(f"  {'FAILS' if name in self.failures else 'holds'}  {name}")
            lines.extend(f"           {line}" for line in self.failures.get(name, "").splitlines())
        return "\n".join(lines)


def run_checks(name: str, subject: Subject, checks: Sequence[Callable[[Subject], None]]) -> ConformanceReport:
    """Run all checks, then raise one ConformanceError that lists all failures, if there are any."""
    failures: dict[str, str] = {}
    for check in checks:
        try:
            check(subject)
        except ConformanceError as error:
            failures[check.__name__] = str(error)
        except Exception as error:  # whatever the subject raised is a finding, and the other checks still run
            failures[check.__name__] = f"raised {type(error).__name__}: {error}"
    report = ConformanceReport(name, tuple(check.__name__ for check in checks), failures)
    if failures:
        raise ConformanceError(str(report))
    return report


def require(holds: bool | Tensor, explanation: str) -> None:
    """Raise a ConformanceError with the explanation unless the condition holds."""
    if not holds:
        raise ConformanceError(explanation)


def seeded(seed: int = 0) -> Generator:
    """A generator on the CPU."""
    return torch.Generator().manual_seed(seed)


@contextmanager
def everything_unchanged(model: nn.Module, images: Tensor) -> Iterator[None]:
    """Require that the block leaves the model, the images and the switches of torch as they were."""
    before = _state(model, images)
    yield
    changed = [name for name, value in _state(model, images).items() if value != before[name]]
    require(not changed, f"the calls left these changed: {', '.join(changed)}")


def _state(model: nn.Module, images: Tensor) -> dict[str, object]:
    return {
        "images": (images.tolist(), images.requires_grad),
        "weights": [value.tolist() for value in model.state_dict().values()],
        "training": [module.training for module in model.modules()],
        "requires_grad": [parameter.requires_grad for parameter in model.parameters()],
        "gradients": [parameter.grad is not None for parameter in model.parameters()],
        "hooks": [len(module._forward_hooks) for module in model.modules()],
        "grad mode": torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype(),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "tf32 convolutions": torch.backends.cudnn.allow_tf32,
        "global random state": torch.get_rng_state().tolist(),
    }
