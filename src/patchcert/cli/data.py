"""`patchcert data list | fetch | verify | labels`."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

import patchcert as pc
from patchcert.cli import options
from patchcert.cli.output import Report, print_json, progress_bar, say
from patchcert.errors import DataError

app = typer.Typer(add_completion=False, no_args_is_help=False)

Name = Annotated[str, typer.Argument(help="Name of the data set; `patchcert data list` shows them.")]


@app.command("list")
def list_data(data_dir: options.DataFolder = None) -> None:
    """Say which data sets there are and which of them are on this machine."""
    from patchcert.data import SOURCES
    from patchcert.data.files import MNIST_MINI, data_folders, locate

    rows: list[dict[str, Any]] = [{"name": MNIST_MINI, "available": True, "where": "in the package"}]
    for source in SOURCES.values():
        try:
            located = locate(source, data_dir)
            rows.append(
                {"name": source.name, "available": True, "where": str(located.archive or located.folder)}
            )
        except DataError:
            rows.append({"name": source.name, "available": False, "where": None})
    print_json({"searched": [str(folder) for folder in data_folders(data_dir)], "data": rows})


@app.command()
def fetch(
    name: Name,
    data_dir: options.DataFolder = None,
    mirror: Annotated[
        str | None,
        typer.Option(help="URL or path of a folder that holds the published files, instead of the official."),
    ] = None,
) -> None:
    """Download a data set from its official mirrors; every file is checked before it gets its name."""
    from patchcert.data.fetch import fetch as fetch_source
    from patchcert.data.sources import find_source

    source = find_source(_published(name))
    with progress_bar(f"fetching {name}", "bytes") as report:
        folder = fetch_source(source, data_dir, mirror, _of_all_files(report))
    say(f"{name} is in {folder}")
    print_json({"name": name, "folder": str(folder)})


@app.command()
def verify(name: Name, data_dir: options.DataFolder = None) -> None:
    """Compare every file of a data set with its known SHA-256 sum, and read all of it."""
    from patchcert.data.files import assemble, locate, read
    from patchcert.data.sources import find_source

    source = find_source(_published(name))
    located = locate(source, data_dir)
    checked = read(source, located)
    dataset = assemble(source, checked)
    files = [
        {"file": file, "sha256": part.sha256, "verified": part.is_verified} for file, part in checked.items()
    ]
    if not all(part.is_verified for part in checked.values()):
        say(f"{name}: no published sum is known for some files, and none was recorded when they were fetched")
    print_json(
        {
            "name": name,
            "where": str(located.archive or located.folder),
            "train": len(dataset.train),
            "test": len(dataset.test),
            "files": files,
        }
    )


@app.command()
def labels(
    name: Name,
    out: Annotated[Path, typer.Option(help="The file to write.")],
    train: Annotated[
        bool, typer.Option("--train", help="Of the training images instead of the test images.")
    ] = False,
    data_dir: options.DataFolder = None,
) -> None:
    """Write labels, one or two bytes each, in the form in which the package ships them for audits."""
    from patchcert.data.labels import packed_labels
    from patchcert.files import atomic_write, sha256

    dataset = pc.load_dataset(name, data_dir)
    with atomic_write(out) as stream:
        stream.write(packed_labels(dataset, train))
    count = len(dataset.train if train else dataset.test)
    print_json({"name": name, "labels": count, "file": str(out), "sha256": sha256(out)})


def _of_all_files(report: Report) -> Callable[[str, int, int], None]:
    """Reports the bytes of all files so far, of those that are known to come."""
    arrived: dict[str, int] = {}

    def count(file: str, done: int, total: int) -> None:
        arrived[file] = done
        together = sum(arrived.values())
        report(together, together + total - done if total else 0)

    return count


def _published(name: str) -> str:
    from patchcert.data.files import MNIST_MINI
    from patchcert.data.folder import FOLDER

    if name == MNIST_MINI:
        raise DataError(f"{name} ships with the package: there is nothing to fetch or verify")
    if name.startswith(FOLDER):
        raise DataError(
            f"{name} is a folder of yours: nobody publishes its files or their sums, so there is nothing to "
            "fetch or verify",
            hint="its sums are written down with every training and all evidence; compare those.",
        )
    return name
