"""One run in a process of its own: trained to its end, then certified against every threat asked for.

Started as `python -m patchcert.papers.chiang2020.worker RUN ...`; its output goes to a log. It ends in
order, with its state saved, when a file named `.stop` appears in the folder or when its parent is gone.
"""

import _thread
import json
import os
import signal
import sys
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchcert.errors import PatchcertError

if TYPE_CHECKING:
    import torch

    from patchcert.data import Dataset
    from patchcert.papers.chiang2020.orders import Orders
    from patchcert.papers.chiang2020.rows import AnyThreat
    from patchcert.papers.chiang2020.siblings import Archive
    from patchcert.train.run_folder import Run

STOP_FILE = ".stop"
FAILED, MISTAKEN, INTERRUPTED = 1, 2, 130
LOOK_EVERY = 0.3
LOG_VOTES_EVERY = 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code of one run: 0 done, 2 a mistake, 130 interrupted with its state saved."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    options = _parse(arguments)
    _log(f"working on {options.run} on {options.device}")
    try:
        threading.Thread(target=_watch, args=(options.run, options.parent), daemon=True).start()
        carry_out(options.run, options.device, options.data_dir, options.results)
    except KeyboardInterrupt:
        _log("interrupted")
        return INTERRUPTED
    except PatchcertError as error:
        _log(f"error: {error}")
        return MISTAKEN
    _log("done")
    return 0


def carry_out(folder: Path, device_name: str, data_dir: Path | None, results: Path | None = None) -> None:
    """Train the run in the folder to its end, and leave evidence for each threat and attack of its task."""
    import torch

    from patchcert.data import load_dataset
    from patchcert.papers.chiang2020.ablation_voting import vote_run
    from patchcert.papers.chiang2020.evidence import evidence_name
    from patchcert.papers.chiang2020.orders import read_orders
    from patchcert.papers.chiang2020.siblings import Archive
    from patchcert.train.run_folder import Run
    from patchcert.train.training import Workplace, train_run

    task = read_orders(folder)
    device = torch.device(device_name)
    spec = Run.open(folder).spec
    run = train_run(spec, folder, Workplace(device, data_dir), resume=True, listener=_EpochLog())
    dataset = load_dataset(spec.data.name, data_dir)
    for threat in task.threats:
        if is_missing(run, evidence_name(threat, task.limit)):
            _certify(run, dataset, threat, task.limit, device)
    _attack(run, dataset, task, Archive(folder.parent, results), device)
    for votes in task.votes:
        if is_missing(run, votes.name):
            _log(f"{votes.name}: {vote_run(run, dataset, votes, device, _VoteLog()).words}")


def _attack(
    run: "Run", dataset: "Dataset", task: "Orders", archive: "Archive", device: "torch.device"
) -> None:
    """Attacks on the model alone, then the trials of defenses' settings, last the attacks behind a defense."""
    from patchcert.papers.chiang2020.attacking import attack_run
    from patchcert.papers.chiang2020.tuning import try_settings

    for plan in task.attacks:
        if not plan.defense and is_missing(run, plan.name):
            _log(f"{plan.name}: {attack_run(run, dataset, plan, device):.2%} withstood")
    for tuning in task.tunings:
        if archive.trials(run.path.name, tuning) is None:
            _log(f"{tuning.name}: {try_settings(run, dataset, tuning, device)} settings tried")
    for plan in task.attacks:
        if plan.defense and not task.tunes_only:
            choice = archive.choice(task.siblings, plan)
            if is_missing(run, plan.name) or run.evidence_meta(plan.name)["defense"] != choice.setting:
                withstood = attack_run(run, dataset, plan, device, choice)
                _log(f"{plan.name}: {withstood:.2%} withstood behind {choice.setting}")


def is_missing(run: "Run", name: str) -> bool:
    """Whether the run's present weights have no evidence of that name."""
    from patchcert.files import sha256

    if name not in run.evidence_names():
        return True
    return run.evidence_meta(name).get("weights_sha256") != sha256(run.weights)


def _certify(
    run: "Run", dataset: "Dataset", threat: "AnyThreat", limit: int | None, device: "torch.device"
) -> None:
    """Verdicts, and margins where the threat is the one that was trained against: without them it is faster."""
    from patchcert.certificates.intervals import IntervalCertifier
    from patchcert.evidence.proving import Proving
    from patchcert.files import sha256
    from patchcert.papers.chiang2020.evidence import certificate_columns, certify_command, evidence_name
    from patchcert.train.environment import describe_machine
    from patchcert.train.run_folder import EVIDENCE

    images = dataset.test.take(limit or len(dataset.test)).to(device)
    name, is_other = evidence_name(threat, limit), threat != run.spec.threat
    claim = {
        "kind": "certify",
        "command": certify_command(run.path.name, threat, limit),
        "weights_sha256": sha256(run.weights),
        "data": {"name": dataset.name, "split": "test", "limit": limit, "sha256": dict(dataset.checksums)},
        "threat": threat.to_dict(),
        **describe_machine(device),
    }
    model, certifier = run.model(device), IntervalCertifier(verdicts_only=is_other)
    proving = Proving.towards(run.path / EVIDENCE / f"{name}.npz", certifier, model, claim)
    proof = proving.certify(model, images.floats(), images.labels, threat)
    found = proof.certificates
    settings = {
        "dtype": "float32",
        "memory_budget": None,
        "verdicts_only": bool(found.margins.isnan().all()),
    }
    circumstances = {"settings": settings, "seconds": round(proof.seconds, 3)}
    run.write_evidence(name, certificate_columns(found), claim | circumstances)
    proving.discard()
    _log(f"{threat}: {found.clean_accuracy:.2%} right, {found.certified_accuracy:.2%} certified")


class _EpochLog:
    """One line of the log for each epoch."""

    def on_batch(self, position: object, batches: int) -> None:
        """Batches are not logged."""

    def on_epoch(self, row: Mapping[str, Any]) -> None:
        """Everything that is known of the epoch."""
        _log(json.dumps(dict(row)))


class _VoteLog:
    """A line of the log every few seconds while votes are counted."""

    def __init__(self) -> None:
        self._said_at = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        """Say how many images are done, unless it was said just now."""
        if time.monotonic() - self._said_at >= LOG_VOTES_EVERY or done == total:
            self._said_at = time.monotonic()
            _log(f"votes on {done:,} of {total:,} images")


def _watch(folder: Path, parent: int) -> None:
    """Asks the main thread to stop once; runs beside it to the end of the process."""
    while not (folder / STOP_FILE).exists() and os.getppid() == parent:
        time.sleep(LOOK_EVERY)
    _thread.interrupt_main()


def _parse(arguments: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--parent", type=int, default=os.getppid())
    return parser.parse_args(arguments)


def _log(line: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
