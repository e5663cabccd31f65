"""Measurements as a table for people and as plain data for machines."""

import platform
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from patchcert.bench.measure import Machine, Measurement

_COLUMNS = (
    ("dense fwd", "dense_forward"),
    ("dense step", "dense_step"),
    ("sweep fp32", "sweep_float32"),
    ("sweep tf32", "sweep_tf32"),
    ("certify", "certification"),
    ("verdicts", "verdicts"),
    ("train step", "training_step"),
    ("floor fp32", "floor_float32"),
    ("floor tf32", "floor_tf32"),
)


def device_name(device: torch.device) -> str:
    """The device in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()} CPU, {torch.get_num_threads()} threads"


def summary(machine: Machine, measurements: Sequence[Measurement]) -> dict[str, Any]:
    """Device, ceilings and all figures."""
    ceilings = machine.ceilings
    return {
        "device": device_name(machine.device),
        "torch": torch.__version__,
        "batch": machine.batch,
        "certified_images": machine.certified_images,
        "float32_teraflops": ceilings.float32 / 1e12,
        "tf32_teraflops": ceilings.tf32 / 1e12,
        "bandwidth_gigabytes": ceilings.bandwidth / 1e9,
        "cases": [measurement.to_dict() for measurement in measurements],
    }


def show(machine: Machine, measurements: Sequence[Measurement]) -> None:
    """Two tables on the terminal: microseconds per image, and ratios to the dense step."""
    console = Console(width=150)
    facts = summary(machine, [])
    console.print(
        f"{facts['device']}, torch {facts['torch']}, batch {machine.batch}; ceilings "
        f"{facts['float32_teraflops']:.1f} / {facts['tf32_teraflops']:.1f} TFLOP/s (float32 / TF32), "
        f"{facts['bandwidth_gigabytes']:.0f} GB/s"
    )
    console.print(_times(measurements))
    console.print(_ratios(measurements))


def _times(measurements: Sequence[Measurement]) -> Table:
    table = Table(title="microseconds per image, all placements")
    table.add_column("case")
    for name, _ in _COLUMNS:
        table.add_column(name, justify="right")
    for measurement in measurements:
        table.add_row(measurement.case, *(f"{getattr(measurement, key):,.1f}" for _, key in _COLUMNS))
    return table


def _ratios(measurements: Sequence[Measurement]) -> Table:
    table = Table(title="times faster than the dense step; peak memory")
    for name in ("case", "train step", "sweep fp32", "certify", "floor reached", "dense GB", "step GB"):
        table.add_column(name, justify="left" if name == "case" else "right")
    for each in measurements:
        reached = f"{each.floor_float32 / each.sweep_float32:.0%}"
        ratios = (f"{value:.1f}x" for value in (each.step_ratio, each.sweep_ratio, each.certification_ratio))
        memory = (f"{each.dense_gigabytes:.2f}", f"{each.step_gigabytes:.2f}")
        table.add_row(each.case, *ratios, reached, *memory)
    return table
