"""Weights and the description they belong to in one safetensors file; reading one never runs code."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from patchcert.errors import ModelError
from patchcert.files import atomic_write
from patchcert.models.registry import ModelSpec, build

_KEY = "patchcert.model"
_SAVE_HINT = "Write model files with patchcert.models.save(model, spec, path)."
_OWN_HINT = "Any other module is certified by the function that makes it: my_models:factory --weights FILE."
_INNER, _NORMALISATION = "network.", "normalize."
"""How `build` names the module of an architecture, where that is no Sequential, and what it puts before it."""


def save(model: nn.Module, spec: ModelSpec, path: str | Path, half: bool = False) -> None:
    """Write the weights with their description. The file appears whole or not at all.

    The model is the one that `build(spec)` makes, or the module alone that the architecture's function returns.
    With `half` the parameters take two bytes each, and are refused unless that holds them exactly;
    `trimming.round_to_half` makes them so.
    """
    weights = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    built = build(spec, torch.Generator())
    weights = _as_built(weights, built.state_dict())
    _check_fit(weights, built, "the model to be saved")
    if half:
        weights |= {name: _halved(name, weights[name]) for name, _ in built.named_parameters()}
    content = safetensors.torch.save(weights, metadata={_KEY: json.dumps(spec.to_dict())})
    with atomic_write(Path(path)) as stream:
        stream.write(content)


def load(path: str | Path) -> tuple[nn.Sequential, ModelSpec]:
    """The model of a file written by `save`, on the CPU in eval mode, and its description.

    Weights that are stored in half precision are read as the same numbers in float32.
    """
    path = Path(path)
    stored, metadata = read_tensors(path)
    weights = {
        name: value.float() if value.dtype == torch.float16 else value for name, value in stored.items()
    }
    spec = _described(metadata, path)
    model = build(spec, torch.Generator())
    _check_fit(weights, model, str(path))
    model.load_state_dict(weights, assign=True)
    return model.eval(), spec


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Give the model the weights of a safetensors file or of a state dict that `torch.save` wrote.

    They keep the type they are stored in. No code is run: of a pickle only tensors and plain containers are read.
    """
    model.load_state_dict(_fitting(model, Path(path)), assign=True)


def copy_weights(model: nn.Module, path: str | Path) -> None:
    """The same for a model that `build` made, in its own types; names may be those of the architecture's module alone.

    Another normalisation than the model's is refused.
    """
    weights = _fitting(model, Path(path))
    _check_normalisation(weights, model.state_dict(), str(path), hint="train with the data that they are of")
    model.load_state_dict(weights)


def _fitting(model: nn.Module, path: Path) -> dict[str, Tensor]:
    """What a file holds, if it is just what the model has."""
    stored = read_tensors(path)[0] if path.suffix == ".safetensors" else _read_pickle(path)
    weights = _as_built(_unwrapped(stored, path), model.state_dict())
    misfits = find_misfits(weights, model.state_dict())
    if misfits:
        raise ModelError(
            f"the weights in {path} do not fit the model {type(model).__name__}: {misfits}",
            hint="Save them from the same module: torch.save(model.state_dict(), path).",
        )
    return weights


def state_sha256(model: nn.Module) -> str:
    """A sum over names, types, shapes and numbers of all weights, whatever file they came from."""
    total = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        total.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        total.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def is_half(path: str | Path) -> bool:
    """Whether a file written by `save` holds its parameters in half precision."""
    weights, _ = read_tensors(Path(path))
    return any(value.dtype == torch.float16 for value in weights.values())


def _halved(name: str, value: Tensor) -> Tensor:
    half = value.half()
    if not torch.equal(half.to(value.dtype), value):
        raise ModelError(
            f"{name} holds numbers that half precision cannot",
            hint="round the model first with patchcert.models.trimming.round_to_half(model)",
        )
    return half


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What is in a safetensors file, and its metadata, as copies: tensors that lie in the file would change with it."""
    if not path.is_file():
        raise ModelError(f"there is no model file {path}", hint=_SAVE_HINT)
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            weights = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - not a dict
            return weights, file.metadata() or {}
    except (safetensors.SafetensorError, OSError) as error:
        raise ModelError(
            f"{path} is not a readable safetensors file: {error}",
            hint=f"It may be cut short or of another format. {_SAVE_HINT} {_OWN_HINT}",
        ) from error


_CONTAINERS = ("state_dict", "model_state_dict", "model")
"""Where checkpoints keep the state dict among other things."""
_WRAPPERS = ("module.", "_orig_mod.")
"""What DataParallel and torch.compile put before the names of weights."""


def _read_pickle(path: Path) -> object:
    if not path.is_file():
        raise ModelError(f"there is no file of weights {path}")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ModelError(
            f"{path} cannot be read as plain weights: it holds other objects than tensors, or is damaged",
            hint="whole models are pickled code, which is never run: write torch.save(model.state_dict(), path), or a "
            "safetensors file.",
        ) from error


def _unwrapped(stored: object, path: Path) -> dict[str, Tensor]:
    """The state dict in what was stored, by the names that the model itself gives its weights."""
    if isinstance(stored, Mapping):
        stored = next((stored[key] for key in _CONTAINERS if isinstance(stored.get(key), Mapping)), stored)
    if not isinstance(stored, Mapping) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in stored.items()
    ):
        raise ModelError(
            f"{path} holds no state dict, a mapping of names to tensors",
            hint="write it with torch.save(model.state_dict(), path).",
        )
    weights = dict(stored)
    for wrapper in _WRAPPERS:
        if weights and all(name.startswith(wrapper) for name in weights):
            weights = {name.removeprefix(wrapper): value for name, value in weights.items()}
    return weights


def _described(metadata: dict[str, str], path: Path) -> ModelSpec:
    if _KEY not in metadata:
        raise ModelError(
            f"{path} holds weights but does not say which model they belong to",
            hint="Build the model with patchcert.models.build, load the weights into it, and save it with "
            f"patchcert.models.save(model, spec, path). {_OWN_HINT}",
        )
    try:
        return ModelSpec.from_dict(json.loads(metadata[_KEY]))
    except (ValueError, TypeError) as error:
        raise ModelError(
            f"the model description in {path} cannot be read: {error}", hint=_SAVE_HINT
        ) from error


def _as_built(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights by their names in the built model, where they are those of the architecture's module alone."""
    inner = {name.removeprefix(_INNER) for name in expected if name.startswith(_INNER)}
    if weights.keys() != inner:
        return weights
    around = {name: value for name, value in expected.items() if name.startswith(_NORMALISATION)}
    return around | {_INNER + name: value for name, value in weights.items()}


def _check_fit(weights: dict[str, Tensor], model: nn.Sequential, where: str) -> None:
    """Names and shapes are exactly those of the described model, and so is its normalisation."""
    expected = model.state_dict()
    misfits = find_misfits(weights, expected)
    if misfits:
        raise ModelError(
            f"the weights in {where} do not fit the model they are said to be of: {misfits}",
            hint=f"Give the description of this very model, or the model that build(spec) makes. {_OWN_HINT}",
        )
    _check_normalisation(weights, expected, where, _SAVE_HINT)


def _check_normalisation(
    weights: Mapping[str, Tensor], expected: Mapping[str, Tensor], where: str, hint: str
) -> None:
    for name in ("normalize.mean", "normalize.std"):
        if name in expected and not torch.allclose(weights[name].to(expected[name]), expected[name]):
            raise ModelError(f"{name} in {where} is not what the description says", hint=hint)


def find_misfits(weights: dict[str, Tensor], expected: dict[str, Tensor], most: int = 6) -> str:
    """Names, shapes and types in which weights differ from those of a model, the first of them; empty where none do."""
    found = [f"{name} is not part of it" for name in weights if name not in expected]
    for name, value in expected.items():
        weight = weights.get(name)
        if weight is None:
            found.append(f"{name} is missing")
        elif weight.shape != value.shape:
            found.append(f"{name} has shape {tuple(weight.shape)} instead of {tuple(value.shape)}")
        elif value.is_floating_point() and not weight.is_floating_point():
            found.append(f"{name} is of {weight.dtype} instead of a floating-point type")
    more = len(found) - most
    return "; ".join(found[:most]) + (f"; and {more} more" if more > 0 else "")
