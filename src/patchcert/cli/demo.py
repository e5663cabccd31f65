"""`patchcert demo`: the whole way from images to a page of proofs, on images that ship with the package."""

import shlex
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, final

import typer

import patchcert as pc
from patchcert.cli import options
from patchcert.cli.measuring import measure_once
from patchcert.cli.output import INTERRUPTED, print_json, say, stderr_console
from patchcert.cli.report import exit_if_contradictory
from patchcert.cli.threads import using_threads

if TYPE_CHECKING:
    import torch

    from patchcert.evidence import Subject
    from patchcert.report.summary import ModelSummary
    from patchcert.report.tables import Table
    from patchcert.train.run_folder import Run
    from patchcert.train.spec import Spec

PAGE = "report.html"
TITLE = "patchcert demo: digits against 2x2 patches"
SIDE = 2


def demo(
    out: Annotated[
        Path, typer.Option(help="Run folder; the page is written into it.", file_okay=False)
    ] = Path("patchcert-demo"),
    quick: Annotated[bool, typer.Option("--quick", help="A few seconds and a worse model.")] = False,
    device: options.Device = "cpu",
    threads: Annotated[
        int, options.number_option("CPU threads; more are faster on idle cores, with other weights.")
    ] = 1,
) -> None:
    """Train a small model, prove it against 2x2 patches, attack it, and write a page about it.

    Takes about a minute and no network. Interrupted, it resumes when called again.
    """
    started = time.perf_counter()
    try:
        summary = _carry_out(out, quick, device, threads)
    except KeyboardInterrupt as interruption:
        say(f"nothing is lost: the same command resumes in {out}")
        raise typer.Exit(INTERRUPTED) from interruption
    seconds, page = time.perf_counter() - started, out / PAGE
    _talk(summary, page, seconds)
    print_json(
        {
            "run": str(out),
            "page": str(page),
            "threat": summary.threat.to_dict() if summary.threat else None,
            **summary.shares(),
            "consistent": not summary.contradictions,
            "seconds": round(seconds, 1),
        }
    )
    exit_if_contradictory([summary], page)


def _carry_out(out: Path, quick: bool, device: str, threads: int) -> "ModelSummary":
    from patchcert.cli.train import training_view
    from patchcert.report.page import write_report
    from patchcert.report.summary import Source, summarise
    from patchcert.train.training import Workplace, train_run

    plan, place = _plan(quick), options.parse_device(device)
    _greet(out)
    with using_threads(threads):
        with training_view(plan.spec.schedule.epochs) as view:
            run = train_run(plan.spec, out, Workplace(place), resume=True, listener=view)
        measure(plan, run, place)
        summary = replace(summarise(Source(run)), name=TITLE)
        write_report([summary], out / PAGE)
    return summary


@final
@dataclass(frozen=True)
class DemoPlan:
    """What is trained, and how much of it is certified and attacked."""

    spec: "Spec"
    attack: "pc.PatchAttack"
    images: int = 1000
    sides: tuple[int, ...] = (1, 3, 4)
    side_images: int = 250
    attacked: int = 200


def _plan(quick: bool) -> DemoPlan:
    """A network of one hidden layer against 2x2 patches, with settings chosen on held-out training images.

    Quick are the same steps in a few seconds, for a look at how they fit together; the model is worse.
    """
    attack = pc.PatchAttack(steps=40, step_size=0.1, restarts=20, search="certificate", batch_size=512)
    if not quick:
        return DemoPlan(_spec(hidden=100, epochs=10, ramp_epochs=3, limit=None), attack)
    spec = _spec(hidden=32, epochs=4, ramp_epochs=1, limit=1500)
    weak = replace(attack, steps=20, step_size=0.2, restarts=5)
    return DemoPlan(spec, weak, images=200, sides=(1, 3), side_images=50, attacked=40)


def _spec(hidden: int, epochs: int, ramp_epochs: int, limit: int | None) -> "Spec":
    from patchcert.train.schedules import EpsilonSchedule, LearningRateSchedule, Schedule
    from patchcert.train.spec import DataSettings, ModelSettings, OptimiserSettings, RunSettings, Spec
    from patchcert.train.strategies import AllPlacements

    return Spec(
        data=DataSettings("mnist-mini", validation=500, limit=limit, crop_padding=1),
        model=ModelSettings("mlp", hidden=hidden),
        threat=pc.Patch(SIDE),
        strategy=AllPlacements(),
        schedule=Schedule(
            epochs,
            EpsilonSchedule(natural_epochs=1, ramp_epochs=ramp_epochs),
            LearningRateSchedule(initial=0.005, decay_factor=0.6, decay_every=1),
        ),
        optimiser=OptimiserSettings(batch_size=100),
        run=RunSettings(checkpoint_seconds=5.0, check_every=1, check_images=200),
    )


def measure(plan: DemoPlan, run: "Run", device: "torch.device") -> None:
    """Everything that the plan measures, as evidence in the run's folder; what is there already is not repeated."""
    from patchcert.evidence import Attacking, Certification, Selection, Subject
    from patchcert.files import sha256

    dataset, weights = pc.load_dataset(run.spec.data.name), sha256(run.weights)
    model = run.model(device)

    def subject(count: int, classifier: Any) -> "Subject":  # noqa: ANN401 - a model or a classifier
        limit = None if count >= len(dataset.test) else count
        return Subject(classifier, weights, dataset, Selection(dataset.name, limit=limit), device)

    for side, count in ((SIDE, plan.images), *((side, plan.side_images) for side in plan.sides)):
        asked = subject(count, pc.IntervalBounds(model))
        command = _command("certify", run, asked, ["--patch", f"{side}x{side}"])
        measure_once(Certification(asked, pc.Patch(side), command=command), run, f"certify {side}x{side}")
    attack, asked = plan.attack, subject(plan.attacked, model)
    options = [f"--{name}={getattr(attack, name)}" for name in ("loss", "search", "restarts", "steps")]
    options += [f"--step-size={attack.step_size}", "--save-images"]
    attacking = Attacking(
        asked,
        attack,
        pc.Patch(SIDE),
        command=_command("attack", run, asked, options),
        save_images=True,
    )
    measure_once(attacking, run, f"attack {SIDE}x{SIDE}")


def _command(name: str, run: "Run", subject: "Subject", options: list[str]) -> str:
    """The command that measures the same again."""
    limit = subject.selection.limit
    return shlex.join(
        ["patchcert", name, str(run.path), *options, *([] if limit is None else [f"--limit={limit}"])]
    )


def _greet(out: Path) -> None:
    from patchcert.train.run_folder import WEIGHTS

    if (out / WEIGHTS).is_file():
        say(
            f"{out} holds a trained model already; to start over, delete it or name another folder with --out"
        )
    else:
        say(f"training a small network, so that no 2x2 patch changes what it says of a digit, into {out}")


def _talk(summary: "ModelSummary", page: Path, seconds: float) -> None:
    """The result for people."""
    from patchcert.report.page import lead_sentence

    console = stderr_console()
    console.print()
    console.print(_table(summary).to_rich())
    console.print()
    say(lead_sentence(summary))
    say(f"done in {seconds:.0f} s; open the page in a browser: {page.resolve()}")


def _table(summary: "ModelSummary") -> "Table":
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
