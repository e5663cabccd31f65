"""Weights and the description they belong to in one safetensors file; reading one never runs code."""

import json
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


def save(model: nn.Module, spec: ModelSpec, path: str | Path, half: bool = False) -> None:
    """Write the weights with their description. The file appears whole or not at all.

    With `half` the parameters take two bytes each, and are refused unless that holds them exactly;
    `trimming.round_to_half` makes them so.
    """
    weights = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    _check_fit(weights, build(spec, torch.Generator()), "the model to be saved")
    if half:
        weights |= {name: _halved(name, weights[name]) for name, _ in model.named_parameters()}
    content = safetensors.torch.save(weights, metadata={_KEY: json.dumps(spec.to_dict())})
    with atomic_write(Path(path)) as stream:
        stream.write(content)


def load(path: str | Path) -> tuple[nn.Sequential, ModelSpec]:
    """The model of a file written by `save`, on the CPU in eval mode, and its description.

    Weights that are stored in half precision are read as the same numbers in float32.
    """
    path = Path(path)
    stored, metadata = _read(path)
    weights = {
        name: value.float() if value.dtype == torch.float16 else value for name, value in stored.items()
    }
    spec = _described(metadata, path)
    model = build(spec, torch.Generator())
    _check_fit(weights, model, str(path))
    model.load_state_dict(weights, assign=True)
    return model.eval(), spec


def is_half(path: str | Path) -> bool:
    """Whether a file written by `save` holds its parameters in half precision."""
    weights, _ = _read(Path(path))
    return any(value.dtype == torch.float16 for value in weights.values())


def _halved(name: str, value: Tensor) -> Tensor:
    half = value.half()
    if not torch.equal(half.to(value.dtype), value):
        raise ModelError(
            f"{name} holds numbers that half precision cannot",
            hint="round the model first with patchcert.models.trimming.round_to_half(model)",
        )
    return half


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What is in the file, as copies: tensors that lie in the file itself would change with it."""
    if not path.is_file():
        raise ModelError(f"there is no model file {path}", hint=_SAVE_HINT)
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            weights = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - not a dict
            return weights, file.metadata() or {}
    except (safetensors.SafetensorError, OSError) as error:
        raise ModelError(
            f"{path} is not a readable safetensors file: {error}",
            hint="It may be cut short or of another format. " + _SAVE_HINT,
        ) from error


def _described(metadata: dict[str, str], path: Path) -> ModelSpec:
    if _KEY not in metadata:
        raise ModelError(
            f"{path} holds weights but does not say which model they belong to",
            hint="Build the model with patchcert.models.build, load the weights into it, and save it with "
            "patchcert.models.save(model, spec, path).",
        )
    try:
        return ModelSpec.from_dict(json.loads(metadata[_KEY]))
    except (json.JSONDecodeError, TypeError) as error:
        raise ModelError(
            f"the model description in {path} cannot be read: {error}", hint=_SAVE_HINT
        ) from error


def _check_fit(weights: dict[str, Tensor], model: nn.Sequential, where: str) -> None:
    """Names and shapes are exactly those of the described model, and so is its normalisation."""
    expected = model.state_dict()
    misfits = _misfits(weights, expected)
    if misfits:
        raise ModelError(
            f"the weights in {where} do not fit the model they are said to be of: {'; '.join(misfits)}",
            hint=_SAVE_HINT,
        )
    for name in ("normalize.mean", "normalize.std"):
        if name in expected and not torch.allclose(weights[name].to(expected[name]), expected[name]):
            raise ModelError(f"{name} in {where} is not what the description says", hint=_SAVE_HINT)


def _misfits(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    missing = [f"{name} is missing" for name in expected if name not in weights]
    extra = [f"{name} is not part of it" for name in weights if name not in expected]
    unequal = [
        f"{name} has shape {tuple(weights[name].shape)} instead of {tuple(value.shape)}"
        for name, value in expected.items()
        if name in weights and weights[name].shape != value.shape
    ]
    return missing + extra + unequal
