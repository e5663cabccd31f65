"""The whole state of a training in one safetensors file, from which it resumes exactly where it was saved."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from patchcert.errors import RunError
from patchcert.files import atomic_write
from patchcert.train.loop import Position
from patchcert.train.step import Trainee, laid_out_like

_KEY = "patchcert.state"


@dataclass(frozen=True, slots=True)
class Best:
    """The weights with the highest certified accuracy on the validation images so far, and that accuracy."""

    accuracy: float = -1.0
    epoch: int = -1
    weights: Mapping[str, Tensor] = field(default_factory=dict)


def save_state(path: Path, trainee: Trainee, position: Position, best: Best) -> None:
    """Write weights, optimiser, random state and position, and the best weights so far."""
    facts = asdict(position) | {
        "device": trainee.device.type,
        "notes": {"best_accuracy": best.accuracy, "best_epoch": best.epoch},
    }
    tensors = _tensors(trainee) | {f"kept.{name}": value for name, value in best.weights.items()}
    plain = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    with atomic_write(path) as stream:
        stream.write(safetensors.torch.save(plain, metadata={_KEY: json.dumps(facts)}))


def load_state(path: Path, trainee: Trainee) -> tuple[Position, Best]:
    """Bring the trainee to the saved state; returns the position and the best weights by then."""
    tensors, facts = _read(path)
    kept = _take(tensors, "kept.")
    position = Position(facts["epoch"], facts["batch"], facts["seconds"])
    if position.batch and facts["device"] != trainee.device.type:
        raise RunError(
            f"{path} was saved in the middle of an epoch on {facts['device']}, whose random state "
            f"{trainee.device.type} cannot continue",
            hint=f"resume with --device {facts['device']}",
        )
    generator = tensors.pop("generator")
    if facts["device"] == trainee.device.type:
        trainee.generator.set_state(generator)
    _restore_optimiser(trainee, tensors, path)
    _restore_weights(trainee, tensors, path)
    best = {name: value.to(trainee.device) for name, value in kept.items()}
    return position, Best(facts["notes"]["best_accuracy"], facts["notes"]["best_epoch"], best)


def _take(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Remove the tensors whose names begin so, and return them by the rest of their names."""
    names = [name for name in tensors if name.startswith(prefix)]
    return {name.removeprefix(prefix): tensors.pop(name) for name in names}


def _tensors(trainee: Trainee) -> dict[str, Tensor]:
    tensors = {f"model.{name}": value for name, value in trainee.model.state_dict().items()}
    helper = trainee.objective.helper
    if helper is not None:
        tensors |= {f"helper.{name}": value for name, value in helper.state_dict().items()}
    if trainee.average is not None:
        tensors |= {f"average.{name}": value for name, value in trainee.average.state_dict().items()}
    for number, parameter in enumerate(trainee.parameters):
        for key, value in trainee.optimiser.state.get(parameter, {}).items():
            tensors[f"optimiser.{number}.{key}"] = value
    return tensors | {"generator": trainee.generator.get_state(), "sums": trainee.sums}


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
            return tensors, json.loads((file.metadata() or {})[_KEY])
    except (safetensors.SafetensorError, OSError, KeyError, json.JSONDecodeError) as error:
        raise RunError(
            f"{path} is not a readable training state: {error}", hint="delete the run folder and start over"
        ) from error


def _restore_optimiser(trainee: Trainee, tensors: dict[str, Tensor], path: Path) -> None:
    for number, parameter in enumerate(trainee.parameters):
        saved = _take(tensors, f"optimiser.{number}.")
        for value in saved.values():
            if value.dim() and value.shape != parameter.shape:
                raise _misfit(path, f"parameter {number} has shape {tuple(value.shape)}")
        if saved:
            trainee.optimiser.state[parameter] = {
                key: laid_out_like(parameter, value) if value.dim() else value.to(trainee.device)
                for key, value in saved.items()
            }


def _restore_weights(trainee: Trainee, tensors: dict[str, Tensor], path: Path) -> None:
    current = {key: value for key, value in _tensors(trainee).items() if not key.startswith("optimiser.")}
    current.pop("generator")
    differing = sorted(set(current) ^ set(tensors))
    if differing:
        raise _misfit(path, f"{differing[0]} is in one of them only")
    with torch.no_grad():
        for name, value in current.items():
            if value.shape != tensors[name].shape:
                raise _misfit(path, f"{name} has shape {tuple(tensors[name].shape)}")
            value.copy_(tensors[name])


def _misfit(path: Path, detail: str) -> RunError:
    return RunError(
        f"the state in {path} does not fit the model of its specification: {detail}",
        hint="it was written by another version or specification; start over in another folder",
    )
