"""Options that several commands share: which threat, which data."""

from pathlib import Path
from typing import Annotated

import typer

PatchOption = Annotated[str | None, typer.Option(help="A rectangle, HEIGHTxWIDTH or SIDE: 5x5, 2x8, 5.")]
ShapeOption = Annotated[
    str | None, typer.Option(help="Another shape, like diamond:25, or a file with a stamp (PNG or # and .).")
]
SparseOption = Annotated[int | None, typer.Option(min=1, help="Any so many pixels, anywhere.")]
PlacementsOption = Annotated[
    str | None, typer.Option(help="Where the patch may be: everywhere, corners, 'top,left;...' or a file.")
]
DataOption = Annotated[str | None, typer.Option(help="Data set; a run folder knows its own.")]
DataFolderOption = Annotated[Path | None, typer.Option(help="Folder of the data.")]
SplitOption = Annotated[str, typer.Option(help="test or train.")]

USUAL_STEPS = 150
"""Gradient steps per restart of an attack."""
