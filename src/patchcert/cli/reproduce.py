"""`patchcert reproduce TABLE`: the paper's tables, trained and certified here, or recounted from evidence."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from patchcert.cli.options import parse_bytes, parse_device
from patchcert.cli.output import print_json, print_table, say
from patchcert.errors import InvalidInput

if TYPE_CHECKING:
    from patchcert.papers.chiang2020.counts import Outcome
    from patchcert.papers.chiang2020.tables import Entry, PaperTable

FORMATS = ("table", "markdown", "csv", "latex", "json")


def reproduce(
    table: Annotated[
        str, typer.Argument(help="A table's name, `all`, `list`, or `collect` for runs trained by hand.")
    ] = "list",
    scale: Annotated[
        str | None,
        typer.Option(help="paper (default), quick for a look in minutes, or a factor for the schedule: 0.1."),
    ] = None,
    rows: Annotated[
        list[str] | None, typer.Option(help="Only rows with all these words: 'MNIST all mlp'. Repeatable.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ..., or auto.")] = "auto",
    jobs: Annotated[int, typer.Option(min=1, help="How many runs at once on the device.")] = 1,
    seeds: Annotated[int | None, typer.Option(min=1, help="How many seeds for each run.")] = None,
    tf32: Annotated[
        bool, typer.Option("--tf32", help="Train with products rounded to TF32; certificates never are.")
    ] = False,
    bfloat16: Annotated[
        bool,
        typer.Option(
            "--bfloat16", help="As --tf32, and windows kept in bfloat16 on a GPU: for large networks."
        ),
    ] = False,
    voted_images: Annotated[
        int | None,
        typer.Option(
            min=1, help="Random Ablation: on so many random test images (MNIST: all, CIFAR-10: 1000)."
        ),
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder of the data.")] = None,
    runs: Annotated[Path, typer.Option(help="Folder of the run folders.")] = Path("runs/reproduce"),
    results: Annotated[
        Path | None, typer.Option(help="Folder for evidence; by default RUNS/results.")
    ] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="Train nothing: recount from this folder of evidence.")
    ] = None,
    time_limit: Annotated[
        float | None, typer.Option(min=0, help="Stop in order after so many seconds; call again to go on.")
    ] = None,
    pack: Annotated[Path | None, typer.Option(help="Put all evidence into this tar file.")] = None,
    pack_runs: Annotated[
        bool, typer.Option("--pack-runs", help="With --pack: also the states of unfinished runs.")
    ] = False,
    pack_weights: Annotated[
        bool, typer.Option("--pack-weights", help="With --pack: also the weights of finished runs.")
    ] = False,
    pack_limit: Annotated[str, typer.Option(help="Leave out runs beyond this size.")] = "15MiB",
    unpack: Annotated[Path | None, typer.Option(help="First bring in what --pack wrote elsewhere.")] = None,
    output: Annotated[str, typer.Option("--format", help=f"{', '.join(FORMATS)}.")] = "table",
    write: Annotated[Path | None, typer.Option(help="Write the tables to this Markdown file.")] = None,
    page: Annotated[
        Path | None, typer.Option(help="Write the tables to this HTML page, with charts.")
    ] = None,
) -> None:
    """Recompute a table of the paper, and put its numbers beside ours.

    Runs that are done are skipped and those cut short go on, so that the same command can be given again and
    again. Exits with 1 if a run failed, with 3 if the time limit left runs undone.
    """
    began = time.monotonic()
    _check_options(output, pack, write, page)
    packing = {"--pack-runs": pack_runs, "--pack-weights": pack_weights}
    training = {"--jobs": jobs > 1, "--tf32": tf32, "--bfloat16": bfloat16, "--voted-images": voted_images}
    if pack is None:
        _refuse(packing, "says what --pack packs, which is not given")
    if source is not None:
        _refuse(training, "is about training, and --from trains nothing")
    folder = source or results or runs / "results"
    if unpack is not None:
        _unpack(unpack, folder, runs)
    if source is not None:
        _require_folder(source, "name a folder of evidence, such as the `results` of a checkout")
    code = 0
    if table == "collect":
        _collect(runs, folder)
    elif table == "list":
        _list(output)
    else:
        from patchcert.cli.reproduce_steps import carry_out
        from patchcert.papers.chiang2020.outcome import outcomes
        from patchcert.papers.chiang2020.plan import Effort
        from patchcert.papers.chiang2020.runner import Workshop
        from patchcert.papers.chiang2020.scales import parse_scale

        effort = Effort(parse_scale(scale or "paper"), seeds or 1, tf32, bfloat16, voted_images)
        chosen = _choose(table, rows or [], source is not None)
        if effort.scale.quick and all(entry.dataset == "imagenet" for _, found in chosen for entry in found):
            raise InvalidInput(
                "attacks on ImageNet train nothing and have no quick look",
                hint="leave out --scale, and name the folder of the images and the network with --data-dir.",
            )
        if source is None:
            deadline = None if time_limit is None else began + time_limit
            place = str(parse_device(device))
            shop = Workshop(runs, folder, place, data_dir, jobs, deadline)
            code = carry_out([entry for _, entries in chosen for entry in entries], effort, shop)
        fixed = effort.scale if source is None or scale else None
        found = [(table, outcomes(entries, folder, fixed, seeds)) for table, entries in chosen]
        if page is not None:
            _write_page(found, page, folder, effort.scale.quick)
        if page is None or write is not None:
            _show(found, output, effort.scale.quick, write, folder)
    if pack is not None:
        _pack(pack, folder, runs if pack_runs or pack_weights else None, pack_runs, pack_weights, pack_limit)
    if code:
        raise typer.Exit(code)


def _refuse(options: Mapping[str, object], reason: str) -> None:
    """An option that would do nothing is a mistake."""
    for option, value in options.items():
        if value:
            raise InvalidInput(f"{option} {reason}", hint="leave it out")


def _check_options(output: str, pack: Path | None, write: Path | None, page: Path | None) -> None:
    """Found out before the work, not after it."""
    from patchcert.papers.chiang2020.pack import compression

    if output not in FORMATS:
        raise InvalidInput(f"--format {output} is unknown", hint=f"choose one of {', '.join(FORMATS)}")
    if pack is not None:
        compression(pack)
    if write is not None and write.suffix != ".md":
        raise InvalidInput(f"--write {write} is no name of a Markdown file", hint="end it with .md")
    if page is not None and page.suffix != ".html":
        raise InvalidInput(f"--page {page} is no name of an HTML file", hint="end it with .html")


def _require_folder(path: Path, hint: str) -> None:
    if not path.is_dir():
        raise InvalidInput(f"there is no folder {path}", hint=hint)


def _choose(name: str, texts: list[str], everything: bool) -> "list[tuple[PaperTable, tuple[Entry, ...]]]":
    """The tables asked for with the rows asked for; of all tables, only those that have such rows."""
    from patchcert.papers.chiang2020.tables import find_table, table_names

    if name != "all":
        table = find_table(name)
        return [(table, table.entries if everything and not texts else table.chosen(texts))]
    tables = [find_table(each) for each in table_names()]
    chosen = [
        (table, table.entries if everything and not texts else table.matching(texts)) for table in tables
    ]
    if not any(entries for _, entries in chosen):
        raise InvalidInput(f"no table has a row with the words {' or '.join(map(repr, texts))}")
    return [(table, entries) for table, entries in chosen if entries or not texts]


def _write_page(
    found: "list[tuple[PaperTable, tuple[Outcome, ...]]]", path: Path, folder: Path, quick: bool
) -> None:
    from patchcert.report.reproduction_page import write_reproduction_page

    write_reproduction_page(found, path, str(folder), quick)
    say(f"the page is {path.resolve()}")


def _show(
    found: "list[tuple[PaperTable, tuple[Outcome, ...]]]",
    output: str,
    quick: bool,
    write: Path | None,
    folder: Path,
) -> None:
    from patchcert.papers.chiang2020.results import Results
    from patchcert.report.reproduction import reproduction_document, reproduction_json, reproduction_table

    if write is not None:
        if quick:
            raise InvalidInput("a quick look is no result, so --write does not write it down")
        write.parent.mkdir(parents=True, exist_ok=True)
        write.write_text(reproduction_document(found, Results(folder).all()), encoding="utf-8")
        say(f"wrote {write}")
        return
    if output == "json":
        print_json({"tables": [reproduction_json(table, rows, quick) for table, rows in found]})
        return
    for table, rows in found:
        made = reproduction_table(table, rows, quick)
        if output == "table":
            print_table(made.to_rich())
            typer.echo()
        else:
            made_by = {"markdown": made.to_markdown, "csv": made.to_csv, "latex": made.to_latex}
            typer.echo(made_by[output]())


def _list(output: str) -> None:
    from patchcert.papers.chiang2020.tables import find_table, table_names

    tables = [find_table(name) for name in table_names()]
    if output == "json":
        print_json({"tables": [{"name": table.name, "rows": len(table.entries)} for table in tables]})
        return
    for table in tables:
        typer.echo(f"{table.name:22} {len(table.entries):3} rows  {table.title}")


def _collect(runs: Path, results: Path) -> None:
    from patchcert.papers.chiang2020.collecting import collect_all

    _require_folder(runs, "name the folder that holds the run folders with --runs")
    names = collect_all(runs, results)
    say(f"collected {len(names)} finished runs into {results}")
    if not names:
        say(f"{runs} holds no run folder that is finished and certified; give the folder above such folders")


def _pack(path: Path, results: Path, runs: Path | None, unfinished: bool, weights: bool, limit: str) -> None:
    from patchcert.papers.chiang2020.pack import pack

    packed = pack(path, results, runs, unfinished, weights, parse_bytes(limit))
    size = path.stat().st_size / 2**20
    say(f"packed {packed.results} results and {packed.runs} runs into {path} ({size:.1f} MiB)")
    for name in packed.left_out:
        say(f"left out the run {name}: the file would grow beyond --pack-limit {limit}")


def _unpack(path: Path, results: Path, runs: Path) -> None:
    from patchcert.papers.chiang2020.pack import unpack

    found = unpack(path, results, runs)
    say(f"unpacked {found.results} results into {results} and {found.runs} runs into {runs}")
