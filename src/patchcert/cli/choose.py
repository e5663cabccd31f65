"""`patchcert choose TRIALS.toml`: settings compared on held-out training images, never on test images."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchcert.cli import options
from patchcert.cli.measuring import command_line, measure_once
from patchcert.cli.output import print_json, say
from patchcert.cli.target import METHODS, choose_classifier, open_data, open_target, select_images
from patchcert.cli.train import training_view
from patchcert.errors import InvalidInput

if TYPE_CHECKING:
    import torch

    from patchcert.comparison.trials import Trial, TrialRun, Trials
    from patchcert.evidence import Evidence
    from patchcert.train.run_folder import Run


def choose(
    trials: Annotated[
        Path, typer.Argument(help="A TRIALS.toml with the settings to compare.", dir_okay=False)
    ],
    out: Annotated[Path, typer.Option(help="Folder for the runs of all trials.", file_okay=False)],
    only: Annotated[list[str] | None, typer.Option(help="Only the trial of this name; repeatable.")] = None,
    rank_only: Annotated[
        bool,
        typer.Option(
            "--rank-only", help="Measure nothing: rank what the folder holds, also without weights."
        ),
    ] = False,
    device: options.Device = "auto",
    data_dir: options.DataFolder = None,
) -> None:
    """Train each trial without the held-out training images, certify it on them, and rank the trials.

    What is done is not done again, so that the same command goes on where it stopped. The ranking of all trials that
    are done is JSON on stdout: test images are never looked at.
    """
    from patchcert.comparison.trials import read_trials

    if not trials.is_file():
        raise InvalidInput(f"there is no {trials}", hint="give a TOML file with spec = ... and [[trials]].")
    asked = read_trials(trials)
    known = [trial.name for trial in asked.trials]
    if unknown := set(only or ()) - set(known):
        raise InvalidInput(f"--only {min(unknown)} is no trial", hint=f"trials are {', '.join(known)}.")
    place = options.parse_device(device)
    for trial in asked.trials:
        if not rank_only and (only is None or trial.name in only):
            for each in asked.runs(trial, out):
                _carry_out(asked, each, place, data_dir)
    print_json({"spec": asked.spec, "held_out": asked.held_out, "trials": _ranked(asked, out)})


def _carry_out(asked: "Trials", each: "TrialRun", device: "torch.device", data_dir: Path | None) -> None:
    from patchcert.train.spec import read_spec
    from patchcert.train.training import Workplace, train_run

    spec, folder, trial = read_spec(asked.spec, each.changes), each.folder, each.trial
    from_seed = "" if each.seed is None else f", seed {each.seed}"
    changed = " ".join((*trial.set, *trial.settings))
    say(f"{trial.name}{from_seed}: {changed or 'the specification as it is'}")
    with training_view(spec.schedule.epochs, None) as view:
        train_run(spec, folder, Workplace(device, data_dir), resume=folder.exists(), listener=view)
    _certify(asked, each, device, data_dir)


def _certify(asked: "Trials", each: "TrialRun", device: "torch.device", data_dir: Path | None) -> None:
    """Prove the held-out images, unless that is done."""
    from patchcert.evidence import Certification, Subject

    opened = open_target(str(each.folder))
    assert opened.run is not None
    assert opened.threat is not None
    classifier = choose_classifier(opened, opened.threat, asked.method, asked.proof_settings(each.trial))
    opened.model.to(device)
    dataset = open_data(opened, None, data_dir)
    selection = select_images(opened, dataset, "validation", asked.images)
    subject = Subject(classifier, opened.weights_sha256, dataset, selection, device)
    proof = Certification(subject, opened.threat, command=command_line())
    measure_once(proof, opened.run, "certifying")


def _ranked(asked: "Trials", out: Path) -> list[dict[str, Any]]:
    """All trials that are done, the one with the most certified images first; with seeds, by the mean of those done."""
    rows = []
    for trial in asked.trials:
        found = [row for each in asked.runs(trial, out) for row in _rows(asked, each)]
        rows += [_mean_row(found)] if asked.seeds and found else found
    return sorted(rows, key=lambda row: -row["certified"])


def _rows(asked: "Trials", each: "TrialRun") -> list[dict[str, Any]]:
    """What a run has proven, where it is done."""
    from patchcert.evidence import EvidenceFolder
    from patchcert.train.run_folder import SPEC, Run
    from patchcert.train.spec import read_spec

    if not (each.folder / SPEC).is_file():
        return []
    run = Run.open(each.folder)
    if run.spec.fingerprint() != read_spec(asked.spec, each.changes).fingerprint():
        say(f"{each.folder} is not counted: it was trained with another specification")
        return []
    found = [
        proof for proof in EvidenceFolder(run.evidence_folder).all() if _answers(asked, each.trial, proof)
    ]
    return [_row(each, run, proof) for proof in found]


def _mean_row(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The means of the counts, and what each seed has given."""
    common = ("trial", "set", "images")
    means = {key: round(sum(row[key] for row in rows) / len(rows), 2) for key in ("correct", "certified")}
    seeds = [{key: value for key, value in row.items() if key not in common} for row in rows]
    return {key: rows[0][key] for key in common} | means | {"seeds": seeds}


def _answers(asked: "Trials", trial: "Trial", proof: "Evidence") -> bool:
    """Whether this is the proof that ranks the trial, by its images and by all settings that are given."""
    name, chosen = proof.meta["classifier"]["name"], proof.selection
    is_method = asked.method is None or METHODS[asked.method] == name
    is_same = is_method and proof.has_settings(asked.proof_settings(trial))
    return is_same and (chosen.split, chosen.limit) == (f"validation:{asked.held_out}", asked.images)


def _row(each: "TrialRun", run: "Run", found: "Evidence") -> dict[str, Any]:
    seed = {} if each.seed is None else {"seed": each.seed}
    return seed | {
        "trial": each.trial.name,
        "set": [*each.trial.set, *each.trial.settings],
        "images": found.total,
        "correct": found.correct,
        "certified": found.certified,
        "training_seconds": round(run.training_seconds, 1),
        "certifying_seconds": found.meta["seconds"],
        "fingerprint": run.spec.fingerprint(),
    }
