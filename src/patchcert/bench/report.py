"""Measurements as tables: on the terminal, in Markdown, and as plain data from which both are made."""

import platform
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from patchcert.bench.measure import Machine, Measurement

Facts = Mapping[str, Any]

_TIMES = (
    ("dense forward", "dense_forward"),
    ("dense step", "dense_step"),
    ("sweep float32", "sweep_float32"),
    ("sweep TF32", "sweep_tf32"),
    ("certify", "certification"),
    ("verdicts", "verdicts"),
    ("training step", "training_step"),
    ("floor float32", "floor_float32"),
    ("floor TF32", "floor_tf32"),
)
_RATIOS = (
    ("training step", "step_ratio"),
    ("sweep float32", "sweep_ratio"),
    ("certify", "certification_ratio"),
)


def device_name(device: torch.device) -> str:
    """The device in words."""
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


def _time_rows(facts: Facts) -> list[list[str]]:
    return [[case["case"], *(f"{case[key]:,.1f}" for _, key in _TIMES)] for case in facts["cases"]]


def _ratio_rows(facts: Facts) -> list[list[str]]:
    rows = []
    for case in facts["cases"]:
        reached = f"{case['sweep_fraction_of_floor']:.0%}"
        memory = [_gigabytes(case[key]) for key in ("dense_gigabytes", "step_gigabytes")]
        rows.append([case["case"], *(f"{case[key]:.1f}x" for _, key in _RATIOS), reached, *memory])
    return rows


def _certification_rows(facts: Facts) -> list[list[str]]:
    rows = []
    for case in facts["cases"]:
        kind = "of the test set" if case["are_test_images"] else "random"
        images = f"{case['certified_images']:,} {kind}"
        each = case["certification"] / case["placements"] * 1e3
        rows.append(
            [
                case["case"],
                f"{case['placements']:,}",
                images,
                f"{case['certification_seconds']:.2f}",
                f"{each:.1f}",
            ]
        )
    return rows


def _gigabytes(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _attack_rows(facts: Facts) -> list[list[str]]:
    """Files from before attacks were measured have none."""
    rows = []
    for case in facts["cases"]:
        rates = case.get("attack")
        if rates is None:
            rows.append([case["case"], *["-"] * (len(ATTACK_HEADER) - 1)])
            continue
        work = f"{rates['images']} x {rates['restarts']} x {rates['steps']}"
        figures = (f"{rates[key]:,.0f}" for key in ("plain", "batched"))
        rows.append([case["case"], *figures, f"{rates['ratio']:.1f}x", work])
    return rows


TIME_TITLE = "Microseconds per image, all placements"
RATIO_TITLE = "Times faster than the dense step; peak memory in GB"
TIME_HEADER = ["case", *(name for name, _ in _TIMES)]
RATIO_HEADER = [
    "case",
    *(name for name, _ in _RATIOS),
    "sweep reaches of its floor",
    "dense",
    "training step",
]

CERTIFICATION_TITLE = "Certification, whole calls with every margin"
CERTIFICATION_HEADER = ["case", "placements", "images", "seconds", "nanoseconds per image and placement"]

ATTACK_TITLE = "Attack, image-steps (forward and backward) per second, without early stops"
ATTACK_HEADER = ["case", "plain loop", "batched", "times faster", "images x restarts x steps"]


def _tables(facts: Facts) -> list[tuple[str, list[str], list[list[str]]]]:
    """Title, header and rows of every table."""
    tables = [
        (TIME_TITLE, TIME_HEADER, _time_rows(facts)),
        (RATIO_TITLE, RATIO_HEADER, _ratio_rows(facts)),
        (CERTIFICATION_TITLE, CERTIFICATION_HEADER, _certification_rows(facts)),
    ]
    if any("attack" in case for case in facts["cases"]):
        tables.append((ATTACK_TITLE, ATTACK_HEADER, _attack_rows(facts)))
    return tables


def show(facts: Facts) -> None:
    """All tables on the terminal."""
    console = Console(width=160)
    console.print(heading(facts))
    for title, header, rows in _tables(facts):
        console.print(_rich(title, header, rows))


def _rich(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title)
    for name in header:
        table.add_column(name, justify="left" if name == "case" else "right")
    for row in rows:
        table.add_row(*row)
    return table


def markdown(facts: Facts) -> str:
    """All tables in Markdown."""
    parts = [heading(facts) + "."]
    for title, header, rows in _tables(facts):
        lines = [f"| {' | '.join(header)} |", f"|---|{'---:|' * (len(header) - 1)}"]
        lines += [f"| {' | '.join(row)} |" for row in rows]
        parts += [f"{title}:", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"
