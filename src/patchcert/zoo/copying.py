"""A model of the zoo as a run folder, for whatever works on runs and keeps evidence in them."""

import shutil
from pathlib import Path

from patchcert.files import atomic_write
from patchcert.train.run_folder import SPEC, WEIGHTS, Run, check_new, write_text
from patchcert.train.spec import read_spec
from patchcert.zoo.shelf import Zoo


def copy_to_run(zoo: Zoo, name: str, folder: Path) -> Run:
    """A finished run with the model's weights and specification; it has no metrics and no evidence yet."""
    card = zoo.card(name)
    zoo.load(name)
    check_new(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / SPEC, card.training.spec)
    run = Run(folder, read_spec(folder / SPEC))
    run.write_environment(
        {
            "versions": dict(card.training.versions),
            "device": card.training.device,
            "commit": card.training.commit,
            "data": {"name": card.data, "checksums": dict(card.data_sha256)},
            "zoo": name,
        }
    )
    with zoo.weights(name).open("rb") as read, atomic_write(folder / WEIGHTS) as write:
        shutil.copyfileobj(read, write)
    return run
