"""`patchcert demo`: the whole way from images to a page of proofs, on images that ship with the package."""

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchcert.cli.output import print_error, print_json, say, stderr_console
from patchcert.cli.parsing import parse_device
from patchcert.cli.report import share

if TYPE_CHECKING:
    from patchcert.report.summary import RunSummary
    from patchcert.report.tables import Table

INTERRUPTED = 130
INCONSISTENT = 1
PAGE = "report.html"
TITLE = "patchcert demo: digits against 2x2 patches"


def demo(
    out: Annotated[
        Path, typer.Option(help="Run folder; the page is written into it.", file_okay=False)
    ] = Path("patchcert-demo"),
    quick: Annotated[bool, typer.Option("--quick", help="A few seconds and a worse model.")] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ..., or auto.")] = "cpu",
    threads: Annotated[
        int, typer.Option(min=1, help="CPU threads; more are faster on idle cores, with other weights.")
    ] = 1,
) -> None:
    """Train a small model, prove it against 2x2 patches, attack it, and write a page about it.

    Takes about a minute and no network. Interrupted, it goes on when called again.
    """
    started = time.perf_counter()
    try:
        summary, page, consistent = _carry_out(out, quick, device, threads)
    except KeyboardInterrupt as interruption:
        say(f"nothing is lost: the same command goes on in {out}")
        raise typer.Exit(INTERRUPTED) from interruption
    seconds = time.perf_counter() - started
    _talk(summary, page, seconds)
    print_json(_result(summary, out, page, consistent, seconds))
    if not consistent:
        print_error("the evidence contradicts itself", f"see the red box at the top of {page}")
        raise typer.Exit(INCONSISTENT)


def _carry_out(out: Path, quick: bool, device: str, threads: int) -> "tuple[RunSummary, Path, bool]":
    from patchcert.cli.demo_steps import full_plan, measure, quick_plan, train_demo, using_threads
    from patchcert.report.page import write_report
    from patchcert.report.summary import summarise_run

    plan, place = quick_plan() if quick else full_plan(), parse_device(device)
    _greet(out)
    with using_threads(threads):
        run = train_demo(plan, out, place)
        measure(plan, run, place)
        summary = replace(summarise_run(run), name=TITLE)
        page = write_report([summary], out / PAGE)
    return summary, page.path, page.consistent


def _greet(out: Path) -> None:
    from patchcert.train.run_folder import WEIGHTS

    if (out / WEIGHTS).is_file():
        say(
            f"{out} holds a trained model already; to start anew, delete it or name another folder with --out"
        )
    else:
        say(f"training a small network, so that no 2x2 patch changes what it says of a digit, into {out}")


def _talk(summary: "RunSummary", page: Path, seconds: float) -> None:
    """The result for people."""
    from patchcert.report.page import lead_sentence

    console = stderr_console()
    console.print()
    console.print(_table(summary).to_rich())
    console.print()
    say(lead_sentence(summary))
    say(f"done in {seconds:.0f} s; open the page in a browser: {page.resolve()}")


def _table(summary: "RunSummary") -> "Table":
    from patchcert.report.tables import Column, Table

    rows = (
        ("clean", summary.clean, "right when nobody interferes"),
        ("empirical", summary.empirical, "right under the attack"),
        ("certified", summary.certified, "proven right under every 2x2 patch"),
    )
    columns = (
        Column("accuracy", numeric=False),
        Column("share (95% interval)"),
        Column("meaning", numeric=False),
    )
    return Table("", columns, rows)


def _result(summary: "RunSummary", out: Path, page: Path, consistent: bool, seconds: float) -> dict[str, Any]:
    """The result for programs."""
    return {
        "run": str(out),
        "page": str(page),
        "threat": summary.threat.to_dict() if summary.threat else None,
        "clean": share(summary.clean),
        "empirical": share(summary.empirical),
        "certified": share(summary.certified),
        "consistent": consistent,
        "seconds": round(seconds, 1),
    }
