"""`patchcert zoo list | show | spec | copy | add`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import patchcert as pc
from patchcert.cli.output import print_json, print_table, say
from patchcert.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from patchcert.report.tables import Cell, Table

app = typer.Typer(add_completion=False, no_args_is_help=False)

Name = Annotated[str, typer.Argument(help="Name of a model; `patchcert zoo list` shows them.")]
Folder = Annotated[
    Path | None, typer.Option("--zoo", help="A folder of models with cards, instead of the package's own.")
]


@app.command("list")
def list_models(
    zoo: Folder = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the trained models and what is proven of them."""
    opened = _open(zoo)
    opened.require_models()
    rows = [_row(opened.card(name)) for name in opened.names()]
    if as_json:
        print_json({"folder": str(opened.folder), "bytes": opened.size(), "models": rows})
        return
    print_table(_table(rows).to_rich())


@app.command()
def show(name: Name, zoo: Folder = None) -> None:
    """Print a model's card: counts with exact 95 % intervals, sums, training, commands."""
    from patchcert.report.statistics import Proportion, accuracies

    card = _open(zoo).card(name)
    plain, proof = card.to_dict(), card.proof
    for key in ("right_images", "certified_images"):
        del plain["proof"][key]
    plain["proof"] |= accuracies(proof.images, clean=proof.right, certified=proof.certified)
    for each in plain["attacks"]:
        share = None if each["certified_only"] else Proportion(each["withstood"], each["images"])
        each["interval"] = share and list(share.interval)
    print_json({**plain, "commands": {"certify": card.command, "train": card.training.command}})


@app.command()
def spec(name: Name, zoo: Folder = None) -> None:
    """Print the specification that a model was trained with, as TOML for `patchcert train`."""
    typer.echo(_open(zoo).card(name).training.spec, nl=False)


@app.command()
def copy(
    name: Name,
    out: Annotated[Path, typer.Option(help="The run folder to be made.", file_okay=False)],
    zoo: Folder = None,
) -> None:
    """Make a run folder from a model. It keeps evidence, which `patchcert report` shows."""
    from patchcert.zoo.adding import copy_to_run

    run = copy_to_run(_open(zoo), name, out)
    say(f"{name} is in {run.path}; next: patchcert certify {run.path}")
    print_json({"name": name, "run": str(run.path)})


@app.command()
def add(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Finished and certified run folders.")],
    results: Annotated[
        Path | None, typer.Option(help="Folder of collected evidence, for runs without their own.")
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Store the run even if the model there has more proven images.")
    ] = False,
    zoo: Folder = None,
) -> None:
    """Store the models of runs with cards counted from their evidence.

    A model is named after its data, threat and architecture. One that is there already stays unless the run has
    more certified test images.
    """
    from patchcert.cli.target import open_run
    from patchcert.zoo.adding import add_run

    opened, rows = _open(zoo), []
    for folder in runs:
        added = add_run(opened, open_run(folder), results, replace)
        say(f"{added.card.name}: {added.status}{', ' if added.reason else ''}{added.reason}")
        rows.append({"run": str(folder), **_row(added.card), "status": added.status, "reason": added.reason})
    print_json({"folder": str(opened.folder), "bytes": opened.size(), "runs": rows})


def _open(folder: Path | None) -> "pc.zoo.Zoo":
    if folder is not None and folder.exists() and not folder.is_dir():
        raise InvalidInput(f"--zoo {folder} is not a folder")
    return pc.zoo.shipped() if folder is None else pc.zoo.Zoo(folder)


def _row(card: "pc.zoo.Card") -> dict[str, Any]:
    """What tells models apart; of the strongest attack, also how many of its own images are certified."""
    fair = [attack for attack in card.attacks if not attack.certified_only]
    strongest = min(fair, key=lambda attack: attack.withstood / attack.images, default=None)
    return {
        "name": card.name,
        "data": card.data,
        "threat": str(card.threat),
        "model": card.model.name,
        "hidden": card.model.hidden,
        "widths": list(card.model.widths),
        "parameters": card.parameters,
        "classifier": dict(card.proof.classifier),
        "images": card.proof.images,
        "clean_accuracy": card.proof.right / card.proof.images,
        "certified_accuracy": card.proof.certified / card.proof.images,
        "attacked_images": strongest and strongest.images,
        "attacked_accuracy": strongest and strongest.withstood / strongest.images,
        "certified_of_attacked": strongest and strongest.certified / strongest.images,
    }


def _table(rows: "Sequence[Mapping[str, Any]]") -> "Table":
    """What a reader compares, in per cent. The last columns are about a few images: how many there were, how many of
    them are certified, and how many withstood the strongest attack."""
    from patchcert.report.tables import Column, Table

    names = ("clean", "certified", "attacked images", "of these certified", "of these withstood")
    columns = (
        Column("name", numeric=False),
        Column("parameters", decimals=0),
        *(Column(name) for name in names),
    )
    return Table("Trained models, in per cent", columns, tuple(_cells(row) for row in rows))


def _cells(row: "Mapping[str, Any]") -> "tuple[Cell, ...]":
    keys = ("clean_accuracy", "certified_accuracy", "certified_of_attacked", "attacked_accuracy")
    percent = [None if row[key] is None else 100 * row[key] for key in keys]
    return row["name"], row["parameters"], *percent[:2], row["attacked_images"], *percent[2:]
