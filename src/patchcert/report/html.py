"""One self-contained page for one or several runs: no network, no library, no number typed by hand."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

import patchcert
from patchcert.errors import InvalidInput
from patchcert.files import atomic_write
from patchcert.report.pictures import PROVEN, UNPROVEN
from patchcert.report.summary import RunSummary
from patchcert.report.view import RunView, run_view

TABLE_COLUMNS = (
    ("index", "Image"),
    ("label", "Label"),
    ("prediction", "Prediction"),
    ("verdict", "Verdict"),
    ("margin", "Least margin"),
    ("top", "Weakest at"),
    ("outcome", "Attack"),
)
VIOLATIONS_SHOWN = 20


@dataclass(frozen=True)
class Page(os.PathLike[str]):
    """A written page; not `consistent` when its evidence contradicts itself, which it shows in red."""

    path: Path
    consistent: bool

    def __fspath__(self) -> str:
        return str(self.path)


def write_page(runs: Sequence[RunSummary], path: Path) -> Page:
    """The page of the runs, written whole or not at all."""
    if not runs:
        raise InvalidInput("a report needs at least one run, got none", hint="name a run folder")
    views = [run_view(run, position) for position, run in enumerate(runs)]
    with atomic_write(path) as stream:
        stream.write(render(views).encode())
    return Page(path, not any(view.violations for view in views))


def render(views: Sequence[RunView]) -> str:
    """The page as text; the same views give the same text."""
    return (
        page_environment()
        .get_template("report.html.j2")
        .render(
            title=views[0].name if len(views) == 1 else f"{len(views)} runs compared",
            version=patchcert.__version__,
            runs=views,
            has_violations=any(view.violations for view in views),
            violations_shown=VIOLATIONS_SHOWN,
            table_columns=TABLE_COLUMNS,
            ramp=_gradient(),
        )
    )


def page_environment() -> jinja2.Environment:
    """Where pages get their templates: text is escaped, and a name that is not given is an error."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader("patchcert.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _gradient() -> str:
    """The stops of a colour scale over both ramps, with a jump where they meet, at a margin of zero."""
    stops = []
    for ramp, start in ((UNPROVEN, 0.0), (PROVEN, 50.0)):
        step = 50.0 / (len(ramp) - 1)
        stops += [f"rgb{colour} {start + step * at:.1f}%" for at, colour in enumerate(ramp)]
    return ", ".join(stops)
