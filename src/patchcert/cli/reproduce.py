"""`patchcert reproduce TABLE`: the paper's tables, trained and certified here, or recounted from evidence."""

import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from patchcert.cli import options
from patchcert.cli.output import INTERRUPTED, print_json, print_table, say, say_at_once
from patchcert.errors import DataError, InvalidInput

if TYPE_CHECKING:
    from patchcert.papers.chiang2020.runner import Assignment, Effort, Job, State, Workshop
    from patchcert.papers.chiang2020.tables import Entry, PaperTable
    from patchcert.papers.chiang2020.view import TableView

FORMATS = ("table", "markdown", "csv", "latex", "json")
FAILED = 1
TALK_EVERY = 30.0


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
    device: options.Device = "auto",
    jobs: Annotated[int, options.number_option("How many runs at once on the device.")] = 1,
    seeds: Annotated[int | None, options.number_option("How many seeds for each run.")] = None,
    tf32: Annotated[
        bool, typer.Option("--tf32", help="Train with products rounded to TF32; certificates never are.")
    ] = False,
    bfloat16: Annotated[
        bool,
        typer.Option(
            "--bfloat16", help="As --tf32, and windows kept in bfloat16 on a GPU: for large networks."
        ),
    ] = False,
    data_dir: options.DataFolder = None,
    runs: Annotated[Path, typer.Option(help="Folder of the run folders.")] = Path("runs/reproduce"),
    results: Annotated[
        Path | None, typer.Option(help="Folder for evidence; by default RUNS/results.")
    ] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="Train nothing: recount from this folder of evidence.")
    ] = None,
    output: Annotated[str, typer.Option("--format", help=f"{', '.join(FORMATS)}.")] = "table",
    write: Annotated[Path | None, typer.Option(help="Write the tables to this Markdown file.")] = None,
    page: Annotated[
        Path | None, typer.Option(help="Write the tables to this HTML page, with charts.")
    ] = None,
) -> None:
    """Recompute a table of the paper, and put its numbers beside ours.

    Finished runs are skipped and interrupted ones resume, so that the same command can be given again and
    again. Exits with 1 if a run failed.
    """
    options.check_choice("--format", output, FORMATS)
    options.check_suffix("--write", write, "a Markdown file", ".md")
    options.check_suffix("--page", page, "an HTML file", ".html")
    if source is not None:
        for option, is_given in (("--jobs", jobs > 1), ("--tf32", tf32), ("--bfloat16", bfloat16)):
            if is_given:
                raise InvalidInput(
                    f"{option} is about training, and --from trains nothing", hint="leave it out"
                )
        _require_results(source)
    folder = source or results or runs / "results"
    if table == "collect":
        _collect(runs, folder)
        return
    if table == "list":
        _list(output)
        return
    from patchcert.papers.chiang2020.recipes import parse_scale

    asked = parse_scale(scale or "paper")
    chosen = _choose(table, rows or [], source is not None)
    _refuse_quick_imagenet(asked.quick, chosen)
    code = 0
    if source is None:
        from patchcert.papers.chiang2020.runner import Effort, Workshop

        shop = Workshop(runs, folder, str(options.parse_device(device)), data_dir, jobs)
        effort = Effort(asked, seeds or 1, tf32, bfloat16)
        code = carry_out([entry for _, entries in chosen for entry in entries], effort, shop)
    from patchcert.evidence.results import Results
    from patchcert.papers.chiang2020.counting import count_rows
    from patchcert.papers.chiang2020.view import TableView

    fixed, found = asked if source is None or scale else None, Results(folder)
    views = [
        TableView.of(paper, count_rows(entries, found, fixed, seeds), asked.quick)
        for paper, entries in chosen
    ]
    _show(views, output, write, page, folder)
    if code:
        raise typer.Exit(code)


def _refuse_quick_imagenet(quick: bool, chosen: "Sequence[tuple[PaperTable, tuple[Entry, ...]]]") -> None:
    if quick and all(entry.dataset == "imagenet" for _, entries in chosen for entry in entries):
        raise InvalidInput(
            "attacks on ImageNet train nothing and have no quick look",
            hint="leave out --scale, and name the folder of the images and the network with --data-dir.",
        )


def _require_folder(path: Path, hint: str) -> None:
    if not path.is_dir():
        raise InvalidInput(f"there is no folder {path}", hint=hint)


def _require_results(folder: Path) -> None:
    from patchcert.evidence.results import SUMMARY

    hint = "name a folder of evidence, such as the `results` of a checkout"
    _require_folder(folder, hint)
    if not any(folder.glob(f"*/{SUMMARY}")):
        raise InvalidInput(f"{folder} holds no results: no folder in it has a {SUMMARY}", hint=hint)


def _choose(name: str, texts: list[str], everything: bool) -> "list[tuple[PaperTable, tuple[Entry, ...]]]":
    """The tables asked for with the rows asked for; of all tables, only those that have such rows."""
    from patchcert.papers.chiang2020.tables import find_table, table_names

    if name != "all":
        table = find_table(name)
        return [(table, table.chosen(texts, everything))]
    chosen = [(table, table.matching(texts, everything)) for table in map(find_table, table_names())]
    if not any(entries for _, entries in chosen):
        raise InvalidInput(f"no table has a row with the words {' or '.join(map(repr, texts))}")
    return [(table, entries) for table, entries in chosen if entries or not texts]


def _show(
    views: "Sequence[TableView]", output: str, write: Path | None, page: Path | None, folder: Path
) -> None:
    """On the page, in the document, or else on stdout."""
    if page is not None:
        from patchcert.papers.chiang2020.page import write_page

        say(f"the page is {write_page(views, page, str(folder)).resolve()}")
    if write is not None:
        _write_document(views, write, folder)
    elif page is None:
        _print(views, output)


def _write_document(views: "Sequence[TableView]", path: Path, folder: Path) -> None:
    from patchcert.evidence.manifest import Manifest
    from patchcert.evidence.results import Results
    from patchcert.files import write_text
    from patchcert.papers.chiang2020.view import document

    if any(view.quick for view in views):
        raise InvalidInput("a quick look is no result, so --write does not write it down")
    write_text(path, document(views, Results(folder).all(), Manifest.read(folder).superseded))
    say(f"wrote {path}")


def _print(views: "Sequence[TableView]", output: str) -> None:
    if output == "json":
        print_json({"tables": [view.to_json() for view in views]})
        return
    for view in views:
        made = view.to_table()
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
    from patchcert.evidence.results import collect_all

    _require_folder(runs, "name the folder that holds the run folders with --runs")
    names = collect_all(runs, results)
    if not names:
        raise InvalidInput(
            f"{runs} holds no run folder that is finished and certified",
            hint="give the folder above such folders with --runs.",
        )
    say(f"collected {len(names)} finished runs into {results}")


def carry_out(entries: "Sequence[Entry]", effort: "Effort", shop: "Workshop") -> int:
    """Train and measure what the rows need and is not there yet; the exit code that says how it went."""
    from patchcert.papers.chiang2020.runner import Runner, plan

    networks = plan_available_networks(entries, effort, shop)
    runs = plan(entries, effort, shop.data_dir)
    also = f" and {len(networks)} attacks on ImageNet" if networks else ""
    verb = "needs" if len(entries) == 1 else "need"
    counted = f"{_counted(len(entries), 'row')} {verb} {_counted(len(runs), 'run')}{also}"
    say(f"{counted} ({effort.scale.words}) on {shop.device}")
    with stop_on_signals() as stop:
        states = Runner(shop, Talk(), stop).run((*runs, *networks))
    ended = Counter(states.values())
    say(", ".join(f"{count} {state}" for state, count in ended.items()) or "nothing to run")
    if stop.is_set():
        say("stopped; give the same command again to resume")
        return INTERRUPTED
    return FAILED if ended["failed"] or ended["interrupted"] else 0


def plan_available_networks(
    entries: "Sequence[Entry]", effort: "Effort", shop: "Workshop"
) -> "tuple[Assignment, ...]":
    """What is to be attacked on ImageNet: nothing in a quick look, nor where other rows can do without it."""
    asked = [entry for entry in entries if entry.dataset == "imagenet" and not effort.scale.quick]
    if not asked:
        return ()
    from patchcert.papers.chiang2020.imagenet import plan_networks

    try:
        return plan_networks(asked, effort.seeds, shop.data_dir)
    except DataError as error:
        if len(asked) == len(entries):
            raise
        say(f"left out the attacks on ImageNet: {error}")
        return ()


def _counted(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


class Talk:
    """A line for whatever happens, and from time to time one on how far everything is."""

    def __init__(self) -> None:
        self._said_at = time.monotonic()

    def changed(self, assignment: "Assignment", state: "State", note: str) -> None:
        """Say what became of a run."""
        say(f"{state}: {assignment.label} [{assignment.name}]{', ' if note else ''}{note}")

    def passed(self, states: "dict[str, State]", running: "Sequence[Job]") -> None:
        """Say how far the runs are, unless it was said just now."""
        if time.monotonic() - self._said_at < TALK_EVERY:
            return
        self._said_at = time.monotonic()
        ended = sum(state not in ("waiting", "running") for state in states.values())
        say(f"{ended} of {len(states)} runs; now {'; '.join(job.words for job in running)}")


@contextmanager
def stop_on_signals() -> Iterator[Event]:
    """While this lasts Ctrl-C and a polite kill ask for a clean stop; a second one does not wait."""
    order = Event()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def ask(number: int, frame: FrameType | None) -> None:
        if order.is_set():
            raise KeyboardInterrupt
        order.set()
        say_at_once("stopping: every run saves its state")

    for number in before:
        signal.signal(number, ask)
    try:
        yield order
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
