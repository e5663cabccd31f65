"""Options that several commands share, and how their words become threats, sizes, devices and settings."""

import inspect
import math
import os
import re
import types
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args, get_origin

import typer

import patchcert as pc
from patchcert.errors import InvalidInput, InvalidThreat

if TYPE_CHECKING:
    import torch

    from patchcert.bounds.sparse import SparseBound
    from patchcert.certificates import AnyThreat


def number_option(
    words: str,
    *names: str,
    kind: type[int] | type[float] = int,
    least: float = 1,
    most: float = math.inf,
) -> Any:  # noqa: ANN401 - what typer makes of an option
    """An option that takes a number of a kind within limits; help calls it N, and a mistake says what they are."""

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            expected = "a whole number" if kind is int else "a number"
            limits = f"of at least {least}" if most == math.inf else f"from {least} to {most}"
            raise typer.BadParameter(f"{text!r} is not {expected} {limits}.")
        return value

    return typer.Option(*names, parser=read, metavar="N", help=words)


Target = Annotated[
    str,
    typer.Argument(
        help="A run folder, a .safetensors file with a model, an .onnx file, zoo:NAME, zoo:FOLDER/NAME, or "
        "MODULE:FACTORY, a function of yours that returns the model."
    ),
]
Weights = Annotated[
    Path | None,
    typer.Option(help="The weights for MODULE:FACTORY, a safetensors file or a state dict (.pt)."),
]
Normalise = Annotated[
    str | None,
    typer.Option(
        metavar="MEAN/STD",
        help="For MODULE:FACTORY or an .onnx file, normalise images first, like 0.49,0.48,0.45/0.25,0.24,0.26.",
    ),
]
ImageSize = Annotated[
    str | None,
    typer.Option(
        metavar="CxHxW", help="For MODULE:FACTORY: channels, height and width of its images, like 3x32x32."
    ),
]
Patch = Annotated[str | None, typer.Option(help="A rectangle, HEIGHTxWIDTH or SIDE: 5x5, 2x8, 5.")]
Shape = Annotated[
    str | None, typer.Option(help="Another shape, like diamond:25, or a file with a stamp (PNG or # and .).")
]
Sparse = Annotated[int | None, number_option("Any N pixels, anywhere.")]
Patches = Annotated[
    int | None, number_option("N patches at once, each at a placement of its own; else one.", least=2)
]
Camera = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE:FILTER",
        help="The patch is in pixels of a camera, HEIGHTxWIDTH, whose images a filter makes as small as the model's: "
        "1080x1920:bilinear, bilinear-antialias, area, nearest or nearest-exact.",
    ),
]
Placements = Annotated[
    str | None, typer.Option(help="Where the patch may be: everywhere, corners, 'top,left;...' or a file.")
]
Data = Annotated[str | None, typer.Option(help="Data set; a run folder knows its own.")]
DataFolder = Annotated[
    Path | None, typer.Option(help="Folder of the data; else $PATCHCERT_DATA, else the cache.")
]
Split = Annotated[str, typer.Option(help="test, train, or validation: what the run held out of training.")]
Limit = Annotated[int | None, number_option("Only the first N images.")]
Method = Annotated[
    str | None,
    typer.Option(
        help="Kind of proof: interval, masking, detection, ablation, bands, blocks or local-votes; by default what "
        "the run was trained for."
    ),
]
Settings = Annotated[
    list[str] | None, typer.Option(help="Setting of the method, like retained=45; repeatable.")
]
Masks = Annotated[
    str | None, typer.Option(help="Masking and detection: masks per axis, K or ROWS,COLUMNS: 6.")
]
Refine = Annotated[
    str | None,
    typer.Option(
        help="Interval bounds: what they leave open goes on to linear bounds (linear), then to branch and bound "
        "(split, with --setting budget=2000 parts for each image)."
    ),
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ..., or auto.")]
Threads = Annotated[int | None, number_option("CPU threads; by default as many as there are cores.")]
EvidenceFile = Annotated[
    Path | None,
    typer.Option("--out", help="Where to write one row of evidence per image; a run folder keeps its own."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but errors on stderr.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Say more on stderr: threads, versions, files.")
]

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_threat(
    patch: str | None,
    shape: str | None,
    sparse: int | None,
    bound: str | None,
    placements: str | None,
    trained: "pc.Patch | pc.SparsePixels | None",
    patches: int | None = None,
    resized: "Callable[[pc.Patch], pc.Patch] | None" = None,
) -> "AnyThreat":
    """The threat that the options name; without any the one a run was trained on.

    `resized` translates a patch from pixels of a camera.
    """
    given = [f"--{name}" for name, value in (("patch", patch), ("shape", shape), ("sparse", sparse)) if value]
    if len(given) > 1:
        raise InvalidThreat(f"{' and '.join(given)} name two threats", hint="give one of them.")
    if bound is not None and sparse is None:
        raise InvalidThreat(f"--bound {bound} needs --sparse", hint="give --sparse K, for any K pixels.")
    if resized is not None and not (patch or shape):
        raise InvalidThreat(
            "--camera needs a patch in the camera's pixels", hint="give --patch 100 or --shape, for example."
        )
    threat = trained
    if stamp := patch or shape:
        threat = pc.Patch(pc.shapes.parse(stamp))
    elif sparse is not None:
        threat = pc.SparsePixels(sparse, cast("SparseBound", bound or "tight"))
    if threat is None:
        raise InvalidThreat(
            "no threat is given", hint="give --patch 5x5, --shape diamond:25 or --sparse 4, for example."
        )
    if isinstance(threat, pc.Patch):
        one = threat if placements is None else pc.Patch(threat.stamp, parse_placements(placements))
        one = one if resized is None else resized(one)
        return one if patches is None else pc.Patches(one, patches)
    for option, value in (("--placements", placements), ("--patches", patches)):
        if value is not None:
            raise InvalidThreat(
                f"{option} {value} needs a patch, not {threat}", hint="give --patch or --shape."
            )
    return threat


def parse_camera(text: str) -> tuple[tuple[int, int], str, bool]:
    """Height and width of a camera's images, the filter that resizes them, and whether that is antialiased."""
    match = re.fullmatch(r"(\d+)x(\d+):([a-z]+(?:-exact)?)(-antialias)?", text.strip())
    if match is None:
        raise InvalidInput(
            f"--camera {text} is not SIZE:FILTER", hint="write it like 1080x1920:bilinear-antialias."
        )
    return (int(match[1]), int(match[2])), match[3], match[4] is not None


def parse_placements(text: str) -> "str | list[tuple[int, int]] | torch.Tensor":
    """`everywhere`, `corners`, a list like `0,0;3,4`, or a file with such a list or a map of # and dots."""
    if text in ("everywhere", "corners"):
        return text
    path = Path(text)
    if not path.is_file():
        return _parse_corners(text, text)
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidThreat(f"cannot read placements from {path}: {error}") from error
    rows = content.split()
    if rows and set("".join(rows)) <= set("#."):
        return pc.shapes.from_rows(rows, "the placement map")
    return _parse_corners(content, str(path))


def parse_normalisation(text: str) -> tuple[list[float], list[float]]:
    """Mean and standard deviation from MEAN/STD, one number for each channel or one for all."""
    try:
        mean, std = ([float(number) for number in part.split(",")] for part in text.split("/"))
    except ValueError as error:
        raise InvalidInput(
            f"--normalise {text} is not MEAN/STD",
            hint="write a number for each channel, like 0.49,0.48,0.45/0.25,0.24,0.26, or 0.13/0.31 for grey images.",
        ) from error
    return mean, std


def parse_bytes(text: str | None) -> int | None:
    """A size like `2GiB`, `500MB` or `1000000`, in bytes."""
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]i?b|b|)\s*", text, re.IGNORECASE)
    size = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if size < 1:
        raise InvalidInput(f"{text!r} is not a size in bytes", hint="write it like 2GiB, 500MB or 1000000.")
    return size


def parse_device(text: str) -> "torch.device":
    """A device that is there: `cpu`, `cuda`, `cuda:1`; `auto` is CUDA where there is one."""
    import torch

    from patchcert.certificates.checks import usable_device

    if text == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return usable_device(text)


def parse_dtype(text: str, option: str = "--dtype") -> "torch.dtype":
    """`float32` or `float64`."""
    import torch

    check_choice(option, text, ("float32", "float64"))
    return getattr(torch, text)


def _parse_corners(text: str, where: str) -> list[tuple[int, int]]:
    pairs = [pair for pair in re.split(r"[;\n]", text) if pair.strip()]
    matches = [re.fullmatch(r"\s*(\d+)\s*[, ]\s*(\d+)\s*", pair) for pair in pairs]
    if not matches or not all(matches):
        raise InvalidThreat(
            f"{where!r} gives no placements",
            hint="give everywhere, corners, a list of top,left like '0,0;3,4', or a file with such a list.",
        )
    return [(int(match[1]), int(match[2])) for match in matches if match]


def check_choice(option: str, word: str | None, choices: Collection[str]) -> None:
    """Refuse a word that is none of the choices; where none is given there is nothing to refuse."""
    if word is not None and word not in choices:
        raise InvalidInput(f"{option} {word} is unknown", hint=f"choose one of {', '.join(choices)}.")


def check_suffix(option: str, path: Path | None, what: str, *suffixes: str) -> None:
    """Refuse the name of a file that ends in none of the suffixes."""
    if path is not None and path.suffix not in suffixes:
        raise InvalidInput(f"{option} {path} is no name of {what}", hint=f"end it with {suffixes[0]}.")


def check_evidence_file(path: Path | None) -> None:
    """Refuse a file that cannot be written before the work, not after it."""
    check_suffix("--out", path, "an evidence file", ".npz")
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise InvalidInput(f"--out {path} cannot be written", hint="name a file in a folder of yours.")


def parse_image_size(text: str) -> tuple[int, int, int]:
    """Channels, height and width from CxHxW."""
    parts = text.split("x")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) for part in parts):
        raise InvalidInput(f"--image-size is {text!r}; expected channels x height x width, like 3x32x32")
    channels, height, width = (int(part) for part in parts)
    return channels, height, width


def with_masks(settings: Sequence[str] | None, masks: str | None) -> list[str]:
    """The settings of a method, those that --masks stands for among them."""
    if masks is None:
        return [*(settings or ())]
    if not re.fullmatch(r"\d+(,\d+)?", masks):
        raise InvalidInput(
            f"--masks {masks} is neither one whole number of masks nor two",
            hint="write K for K x K masks, like 6, or ROWS,COLUMNS, like 6,4.",
        )
    return [*(settings or ()), f"masks={masks}"]


def parse_settings(
    owner: str,
    constructor: type,
    settings: Sequence[str],
    without: Collection[str] = ("model",),
    option: str = "--setting",
) -> dict[str, Any]:
    """Settings from words like `window=7`, as the constructor takes them; unknown names and odd values are refused."""
    parameters = inspect.signature(constructor).parameters
    known = {name: value.annotation for name, value in parameters.items() if name not in without}
    parsed: dict[str, Any] = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        if name not in known:
            raise InvalidInput(
                f"{option} {setting}: {owner} has no setting {name!r}",
                hint=f"it has {', '.join(known)}." if known else "it has none.",
            )
        parsed[name] = _read_value(f"{option} {setting}", value, known[name])
    return parsed


def _read_value(setting: str, value: str, kind: object) -> Any:  # noqa: ANN401 - whatever the setting takes
    import torch

    kinds = get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if value == "none" and type(None) in kinds:
        return None
    if torch.dtype in kinds:
        return parse_dtype(value, setting.partition("=")[0])
    if kind is bool:
        if value not in ("true", "false"):
            raise InvalidInput(f"{setting} is neither true nor false", hint="write one of them.")
        return value == "true"
    try:
        if "," in value and any(get_origin(each) is tuple for each in kinds):
            return tuple(float(part) if "." in part else int(part) for part in value.split(","))
        if int in kinds or float in kinds:
            return int(value) if int in kinds else float(value)
        if re.fullmatch(r"[\d.,\s]+", value):
            return tuple(float(part) for part in value.split(","))
    except ValueError as error:
        raise InvalidInput(f"{setting} is not a number", hint="write it in digits, like 7 or 0.5.") from error
    return value
