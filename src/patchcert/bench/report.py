"""Measurements as tables: on the terminal, in Markdown, and as plain data from which both are made."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from patchcert.bench.measure import Machine, Measurement

Facts = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Table:
    """A title, and for each column its heading and how it shows the figures of a case."""

    title: str
    columns: tuple[tuple[str, str], ...]

    @property
    def header(self) -> list[str]:
        return ["case", *(heading for heading, _ in self.columns)]

    def rows(self, facts: Facts) -> list[list[str]]:
        return [[case["case"], *(_cell(form, case) for _, form in self.columns)] for case in facts["cases"]]


def _cell(form: str, case: Facts) -> str:
    """A dash for what the device does not count and what was not yet measured when the file was written."""
    derived = {
        "kind": "of the test set" if case["are_test_images"] else "random",
        "nanoseconds": case["certification"] / case["placements"] * 1e3,
    }
    try:
        return form.format(**case, **derived)
    except (KeyError, TypeError):
        return "-"


_ATTACK = _Table(
    "Attack, image-steps (forward and backward) per second, without early stops",
    (
        ("plain loop", "{attack[plain]:,.0f}"),
        ("batched", "{attack[batched]:,.0f}"),
        ("times faster", "{attack[ratio]:.1f}x"),
        ("images x restarts x steps", "{attack[images]} x {attack[restarts]} x {attack[steps]}"),
    ),
)
_TABLES = (
    _Table(
        "Microseconds per image, all placements",
        (
            ("dense forward", "{dense_forward:,.1f}"),
            ("dense step", "{dense_step:,.1f}"),
            ("sweep float32", "{sweep_float32:,.1f}"),
            ("sweep TF32", "{sweep_tf32:,.1f}"),
            ("certify", "{certification:,.1f}"),
            ("verdicts", "{verdicts:,.1f}"),
            ("training step", "{training_step:,.1f}"),
            ("floor float32", "{floor_float32:,.1f}"),
            ("floor TF32", "{floor_tf32:,.1f}"),
        ),
    ),
    _Table(
        "Times faster than the dense step; peak memory in GB",
        (
            ("training step", "{step_ratio:.1f}x"),
            ("sweep float32", "{sweep_ratio:.1f}x"),
            ("certify", "{certification_ratio:.1f}x"),
            ("sweep reaches of its floor", "{sweep_fraction_of_floor:.0%}"),
            ("dense", "{dense_gigabytes:.2f}"),
            ("training step", "{step_gigabytes:.2f}"),
        ),
    ),
    _Table(
        "Certification, whole calls with every margin",
        (
            ("placements", "{placements:,}"),
            ("images", "{certified_images:,} {kind}"),
            ("seconds", "{certification_seconds:.2f}"),
            ("nanoseconds per image and placement", "{nanoseconds:.1f}"),
        ),
    ),
)


def device_name(device: torch.device) -> str:
    """The name of the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()} CPU, {torch.get_num_threads()} threads"


def summary(machine: Machine, measurements: Sequence[Measurement]) -> dict[str, Any]:
    """Device, ceilings and all figures in plain types."""
    ceilings = machine.ceilings
    return {
        "device": device_name(machine.device),
        "torch": torch.__version__,
        "batch": machine.batch,
        "float32_teraflops": ceilings.float32 / 1e12,
        "tf32_teraflops": ceilings.tf32 / 1e12,
        "bandwidth_gigabytes": ceilings.bandwidth / 1e9,
        "cases": [measurement.to_dict() for measurement in measurements],
    }


def heading(facts: Facts) -> str:
    """Where the figures come from."""
    return (
        f"{facts['device']}, torch {facts['torch']}, batch {facts['batch']}; ceilings "
        f"{facts['float32_teraflops']:.2f} / {facts['tf32_teraflops']:.2f} TFLOP/s (float32 / TF32), "
        f"{facts['bandwidth_gigabytes']:.0f} GB/s"
    )


def _tables(facts: Facts) -> tuple[_Table, ...]:
    return (*_TABLES, _ATTACK) if any("attack" in case for case in facts["cases"]) else _TABLES


def show(facts: Facts) -> None:
    """All tables on the terminal."""
    console = Console(width=160)
    console.print(heading(facts))
    for table in _tables(facts):
        shown = Table(title=table.title)
        for name in table.header:
            shown.add_column(name, justify="left" if name == "case" else "right")
        for row in table.rows(facts):
            shown.add_row(*row)
        console.print(shown)


def markdown(facts: Facts) -> str:
    """All tables in Markdown."""
    parts = [heading(facts) + "."]
    for table in _tables(facts):
        first, *others = (f"| {' | '.join(row)} |" for row in (table.header, *table.rows(facts)))
        lines = [first, f"|---|{'---:|' * len(table.columns)}", *others]
        parts += [f"{table.title}:", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"
