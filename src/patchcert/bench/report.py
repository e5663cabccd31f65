"""Measurements as tables: on the terminal, in Markdown, and as plain data from which both are made."""

import platform
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rich.console import Console

from patchcert.bench.measure import TEST_IMAGES, Machine, derived_figures
from patchcert.report.tables import Column, Table

Facts = Mapping[str, Any]

_TABLES = {
    "Microseconds per image, all placements": (
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
    "Times faster than the dense step; peak memory in GB": (
        ("training step", "{step_ratio:.1f}x"),
        ("sweep float32", "{sweep_ratio:.1f}x"),
        ("certify", "{certification_ratio:.1f}x"),
        ("sweep reaches of its floor", "{sweep_fraction_of_floor:.0%}"),
        ("dense", "{dense_gigabytes:.2f}"),
        ("training step", "{step_gigabytes:.2f}"),
    ),
    "Certification, whole calls with every margin": (
        ("placements", "{placements:,}"),
        ("images", "{certified_images:,} {kind}"),
        ("seconds", "{certification_seconds:.2f}"),
        ("nanoseconds per image and placement", "{nanoseconds:.1f}"),
    ),
    "Attack, image-steps (forward and backward) per second, without early stops": (
        ("plain loop", "{attack[plain]:,.0f}"),
        ("batched", "{attack[batched]:,.0f}"),
        ("times faster", "{attack[ratio]:.1f}x"),
        ("images x restarts x steps", "{attack[images]} x {attack[restarts]} x {attack[steps]}"),
    ),
    "Linear bounds of all placements and classes, in float64 and sound, best of three slopes": (
        ("microseconds per image, whole images", "{linear[dense]:,.0f}"),
        ("what the patch moves", "{linear[microseconds]:,.0f}"),
        ("times faster", "{linear[ratio]:.1f}x"),
        ("seconds for 1,000 images", "{linear[seconds]:,.1f}"),
    ),
}
"""Of each table the title, and for each column its heading and how it shows the figures of a case."""
_ROUNDING = 1e-9
"""Figures are stored with all their digits: what follows from others differs by a few roundings at most."""
_MASKED_TITLE = "Forward passes per second, on whole images and on masked copies"
_MASKED = (
    ("filters", "{filters}"),
    ("precision", "{precision}"),
    ("batch", "{batch:,}"),
    ("bare network", "{bare:,.0f}"),
    ("behind masks", "{masked:,.0f}"),
    ("compiled", "{compiled:,.0f}"),
    ("share of bare", "{ratio:.0%}"),
    ("share of floor", "{fraction_of_floor:.0%}"),
    ("passes per certificate", "{passes:,}"),
    ("hours for 10,000 certificates, none left early", "{hours:,.2f}"),
    ("certificates a second", "{a_second:,.2f}"),
)
_VOTES_TITLE = (
    "Local votes in float32: seconds of the pass, of the sums at all placements, and of whole certificates"
)
_VOTES = (
    ("filters", "{filters}"),
    ("images", "{images:,}"),
    ("placements", "{placements:,}"),
    ("pass", "{pass_seconds:,.3f}"),
    ("sums", "{sum_seconds:,.3f}"),
    ("certify", "{certify_seconds:,.3f}"),
    ("sums for 10,000 images", "{sums:,.3f}"),
)


def summary(
    machine: Machine,
    cases: Sequence[Facts],
    masked: Sequence[Facts] = (),
    votes: Sequence[Facts] = (),
) -> dict[str, Any]:
    """Device, ceilings and all figures in plain types."""
    ceilings, device = machine.ceilings, machine.device
    processor = f"{platform.processor() or platform.machine()} CPU, {torch.get_num_threads()} threads"
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor,
        "torch": torch.__version__,
        "batch": machine.batch,
        "float32_teraflops": ceilings.float32 / 1e12,
        "tf32_teraflops": ceilings.tf32 / 1e12,
        "bandwidth_gigabytes": ceilings.bandwidth / 1e9,
        "cases": list(cases),
        **({"masked": list(masked)} if masked else {}),
        **({"votes": list(votes)} if votes else {}),
    }


def show(facts: Facts) -> None:
    """All tables on the terminal."""
    console = Console(width=160)
    console.print(_heading(facts))
    for table in _tables(facts):
        console.print()
        console.print(table.to_rich())


def markdown(facts: Facts) -> str:
    """All tables in Markdown."""
    return "\n".join([f"{_heading(facts)}.\n", *(table.to_markdown() for table in _tables(facts))])


def contradictions(facts: Facts) -> tuple[str, ...]:
    """Where figures of a stored measurement do not follow from each other: ratios, and times of whole calls."""
    found = []
    for case in facts["cases"]:
        found += [(case, name, case.get(name), expected) for name, expected in derived_figures(case).items()]
        attack = case.get("attack")
        if attack:
            found.append((case, "attack.ratio", attack["ratio"], attack["batched"] / attack["plain"]))
        linear = case.get("linear")
        if linear:
            found.append((case, "linear.ratio", linear["ratio"], linear["dense"] / linear["microseconds"]))
            found.append((case, "linear.seconds", linear["seconds"], linear["microseconds"] / 1e3))
    for case in facts.get("masked", ()):
        found.append((case, "ratio", case["ratio"], case["masked"] / case["bare"]))
    for case in facts.get("votes", ()):
        found.append((case, "sums", case["sums"], case["sum_seconds"] * TEST_IMAGES / case["images"]))
    return tuple(
        f"{case['case']}: {name} is {stated}, but its parts give {expected}"
        for case, name, stated, expected in found
        if stated is None or not abs(stated - expected) <= _ROUNDING * abs(expected)
    )


def _heading(facts: Facts) -> str:
    return (
        f"{facts['device']}, torch {facts['torch']}, batch {facts['batch']}; ceilings "
        f"{facts['float32_teraflops']:.2f} / {facts['tf32_teraflops']:.2f} TFLOP/s (float32 / TF32), "
        f"{facts['bandwidth_gigabytes']:.0f} GB/s"
    )


def _tables(facts: Facts) -> list[Table]:
    """Those in which anything was measured."""
    cases = [_with_words(case) for case in facts["cases"]]
    tables = [_table(title, columns, cases) for title, columns in _TABLES.items()]
    masked = [{**case, "a_second": TEST_IMAGES / 3600 / case["hours"]} for case in facts.get("masked", ())]
    tables.append(_table(_MASKED_TITLE, _MASKED, masked))
    tables.append(_table(_VOTES_TITLE, _VOTES, facts.get("votes", ())))
    return [table for table in tables if any(cell != "-" for row in table.rows for cell in row[1:])]


def _table(title: str, columns: Sequence[tuple[str, str]], cases: Sequence[Facts]) -> Table:
    return Table(
        title,
        (Column("case", numeric=False), *(Column(name) for name, _ in columns)),
        tuple((case["case"], *(_cell(form, case) for _, form in columns)) for case in cases),
    )


def _with_words(case: Facts) -> Facts:
    """A case with what its tables say in words, and per placement."""
    derived = {
        "kind": "of the test set" if case["are_test_images"] else "random",
        "nanoseconds": case["certification"] / case["placements"] * 1e3,
    }
    return {**case, **derived}


def _cell(form: str, case: Facts) -> str:
    """A dash for what the device does not count and what was not yet measured when the file was written."""
    try:
        return form.format(**case)
    except (KeyError, TypeError):
        return "-"
