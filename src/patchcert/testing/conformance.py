"""What the suites share: checks are small functions whose name is their claim; a report lists which of them held."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TypeVar

import torch
from torch import Generator, nn

Subject = TypeVar("Subject")


class ConformanceError(AssertionError):
    """Something under test broke a promise; the message says which, and on what input."""


@dataclass(frozen=True)
class CheckResult:
    """The outcome of one check: `failure` is empty where its claim held."""

    name: str
    claim: str
    failure: str
    seconds: float

    @property
    def held(self) -> bool:
        """Whether the claim held."""
        return not self.failure


@dataclass(frozen=True)
class ConformanceReport:
    """What was checked, in order, and what was found."""

    subject: str
    checks: tuple[CheckResult, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all checks that ran."""
        return tuple(check.name for check in self.checks)

    @property
    def failures(self) -> tuple[CheckResult, ...]:
        """The checks whose claim did not hold."""
        return tuple(check for check in self.checks if not check.held)

    def __str__(self) -> str:
        lines = [f"{self.subject}: {len(self.checks) - len(self.failures)} of {len(self.checks)} checks hold"]
        for check in self.checks:
            lines.append(f"  {'holds' if check.held else 'FAILS'}  {check.name}")
            lines.extend(f"           {line}" for line in check.failure.splitlines())
        return "\n".join(lines)


def run_checks(name: str, subject: Subject, checks: Sequence[Callable[[Subject], None]]) -> ConformanceReport:
    """Run all checks, then raise one ConformanceError that lists all failures, if there are any."""
    report = ConformanceReport(name, tuple(_run(check, subject) for check in checks))
    if report.failures:
        raise ConformanceError(str(report))
    return report


def require(holds: bool, explanation: str) -> None:
    """Raise a ConformanceError with the explanation unless the condition holds."""
    if not holds:
        raise ConformanceError(explanation)


def seeded(seed: int = 0) -> Generator:
    """A generator on the CPU."""
    return torch.Generator().manual_seed(seed)


def state_around(model: nn.Module) -> dict[str, object]:
    """The modes, flags and hooks of a model and the switches of torch, to compare before and after a call."""
    return {
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


def changed_state(before: dict[str, object], after: dict[str, object]) -> list[str]:
    """The names of what differs."""
    return [name for name, value in before.items() if value != after[name]]


def _run(check: Callable[[Subject], None], subject: Subject) -> CheckResult:
    started = perf_counter()
    failure = ""
    try:
        check(subject)
    except ConformanceError as error:
        failure = str(error) or "no explanation"
    except Exception as error:  # whatever the subject raised is a finding, and the other checks still run
        failure = f"raised {type(error).__name__}: {error}"
    claim = (inspect.getdoc(check) or "").partition("\n")[0]
    return CheckResult(check.__name__, claim, failure, perf_counter() - started)
