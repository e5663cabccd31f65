"""Certify, or attack, and write it down: the one way from a model and images to evidence."""

import hashlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Self, cast, final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Generator, Tensor, fx, nn

from patchcert.attacks import Attack
from patchcert.bounds.lowering import FUNCTION_RULES, LAYER_RULES
from patchcert.certificates import AnyThreat, Certificates, Classifier
from patchcert.certificates.checks import weight_dtype
from patchcert.certificates.classifier import Guarantee, Promise
from patchcert.data import Dataset, Split
from patchcert.defenses import Defended
from patchcert.errors import InvalidInput
from patchcert.evidence.record import MODEL, VERSION, Evidence, EvidenceFolder, Question, Selection
from patchcert.files import atomic_write
from patchcert.progress import Progress
from patchcert.tensors import Images
from patchcert.train.distributed import ALONE, World
from patchcert.train.environment import describe_machine, source_sha256

FIRST_BLOCK, LARGEST_BLOCK = 64, 4096
ATTACKED_ON_CPU, ATTACKED_ELSEWHERE = 16, 512
"""Images that are attacked at a time: with their restarts they fill a batch of the device."""
BLOCK_SECONDS = 10.0
PREDICTED_SECONDS = 0.2
"""How long predictions are measured at least, where there are images enough."""
_PLAIN = (bool, int, float, str, tuple, list, type(None), torch.Size, torch.dtype)


@final
@dataclass(frozen=True)
class Subject:
    """What is measured: a classifier, or a model under attack, with the sum of its weights; and on which images."""

    classifier: Classifier | nn.Module
    weights: str
    dataset: Dataset
    selection: Selection
    device: torch.device

    def positions(self) -> Tensor:
        return self.selection.positions(len(self.dataset.split(self.selection.split)))

    def images(self, positions: Tensor) -> Split:
        """The images at these positions, on the device."""
        return self.dataset.split(self.selection.split)[positions].to(self.device)

    def describe(self) -> dict[str, Any]:
        """The kind of classifier with its settings."""
        if isinstance(self.classifier, Classifier):
            return self.classifier.describe()
        if isinstance(self.classifier, Defended):
            defense = self.classifier.defense
            return {"name": "Defended", "defense": f"{type(defense).__name__}({defense.extra_repr()})"}
        return dict(MODEL)

    def evidence(self, question: Question, columns: Mapping[str, Any], facts: Mapping[str, Any]) -> Evidence:
        """An answer with the circumstances under which it was found."""
        asked = question.to_dict()
        data = {
            **asked["data"],
            "image": list(self.dataset.split(self.selection.split).image_size),
            "sha256": dict(self.dataset.checksums),
        }
        machine = describe_machine(self.device)
        meta = {"version": VERSION, **asked, "data": data, "weights_sha256": self.weights, **facts, **machine}
        return Evidence(columns, meta)


@dataclass(frozen=True)
class _Measurement(ABC):
    """What is worked out block by block and written to a `file`, if one is named; finished blocks wait beside it."""

    subject: Subject

    @property
    @abstractmethod
    def question(self) -> Question:
        """What the evidence answers."""

    @cached_property
    @abstractmethod
    def _partial(self) -> "_Partial": ...

    def into(self, folder: EvidenceFolder) -> Self:
        """The same, written to the file of its question in a folder."""
        return replace(self, file=folder.file(self.question))

    @property
    def can_resume(self) -> bool:
        """Whether an interruption leaves anything to resume from."""
        return self._partial.file is not None

    @property
    def in_the_way(self) -> Path | None:
        """The file where this would keep its blocks, if it holds those of another question or of other weights."""
        return self._partial.file if self._partial.holds_other_work else None


@final
@dataclass(frozen=True)
class Certification(_Measurement):
    """Certifies the images of a subject, block by block, and writes evidence to a file, if one is named.

    Finished blocks wait in a file beside it, so that an interrupted certification resumes where it stopped. Blocks of
    other weights, data, settings, machines, or of other code of this package, are not used; and none are kept of
    models with layers or rules from elsewhere, since no sum tells whether that code has changed.

    In a world of several processes each certifies whole blocks of its own, and only the main one writes the evidence:
    verdicts do not depend on the number of processes.
    """

    threat: AnyThreat
    file: Path | None = None
    command: str = ""
    world: World = ALONE

    @property
    def classifier(self) -> Classifier:
        """The subject's classifier, which must be one that certifies."""
        if not isinstance(self.subject.classifier, Classifier):
            raise InvalidInput(
                f"{type(self.subject.classifier).__name__} is no classifier that certifies",
                hint="give patchcert.IntervalBounds(model), or another kind of proof",
            )
        return self.subject.classifier

    @property
    def question(self) -> Question:
        return Question("certify", self.threat, self.subject.selection, self.subject.describe())

    def run(self, progress: Progress | None = None) -> Evidence:
        """The evidence, with the seconds of earlier, interrupted calls counted in."""
        positions = self.subject.positions()
        images = self._own_images()
        found, seconds = self._prove(images, self._kept(images), progress or _unheard)
        found = _gathered(found, self._rows(len(positions)), len(positions), self.world)
        guarantee = asdict(found.guarantee)
        facts = {"guarantee": guarantee, "command": self.command, "seconds": round(seconds, 3)}
        if self.world.is_main:
            pixels = images.floats().to(_dtype_of(self.classifier))
            facts["prediction"] = prediction_time(self.classifier, pixels)
        evidence = self.subject.evidence(self.question, certificate_columns(found, positions), facts)
        if self.file is not None and self.world.is_main:
            evidence = evidence.write(self.file)
        self._partial.discard()
        return evidence

    def _own_images(self) -> Split:
        """The images that this process certifies."""
        positions = self.subject.positions()
        return self.subject.images(positions[self._rows(len(positions))])

    def _rows(self, total: int) -> slice:
        """Which of all images are this process's: whole blocks, so that their boundaries are the same for any world."""
        size = self.classifier.images_per_block(self.subject.device) or 1
        blocks = -(-total // size)
        if blocks < self.world.size:
            raise InvalidInput(
                f"{total} images are {blocks} blocks of {size}, fewer than the {self.world.size} processes",
                hint="start fewer processes, or certify more images",
            )
        own = self.world.rows(blocks)
        return slice(own.start * size, min(own.stop * size, total))

    @property
    def kept(self) -> int:
        """How many images an interrupted certification has left proven or refuted."""
        kept = self._kept(self._own_images())
        return 0 if kept is None else len(kept[0])

    def _kept(self, images: Split) -> tuple[Certificates, float] | None:
        """What an interrupted certification of these images has left, and how long it took."""
        stored, labels = self._partial.read(), images.labels
        if stored is None:
            return None
        kept, notes = stored
        tensors = {name: value.to(labels.device) for name, value in kept.items()}
        guarantee = Guarantee(cast("Promise", notes["promise"]), float(notes["confidence"]))
        found = Certificates.from_tensors(tensors, guarantee)
        is_theirs = len(found) <= len(labels) and found.labels.equal(labels[: len(found)])
        return (found, float(notes["seconds"])) if is_theirs else None

    def _prove(
        self, images: Split, kept: tuple[Certificates, float] | None, progress: Progress
    ) -> tuple[Certificates, float]:
        total, pixels = len(images), images.floats()
        found, seconds = kept or (None, 0.0)
        done = 0 if found is None else len(found)
        progress(done, total)
        fixed = self.classifier.images_per_block(images.labels.device)
        size = fixed or FIRST_BLOCK
        while found is None or done < total:
            began, rows = time.perf_counter(), slice(done, done + size)
            shifted = _shifted(progress, done, total)
            block = self.classifier.certify(pixels[rows], images.labels[rows], self.threat, shifted)
            block = replace(block, placements=None)  # no column of evidence, and the largest part by far
            found = block if found is None else Certificates.concatenated([found, block])
            took = time.perf_counter() - began
            seconds, done = seconds + took, len(found)
            promise = {"confidence": repr(found.guarantee.confidence), "promise": found.guarantee.promise}
            self._partial.write(found.to_tensors(), seconds, promise)
            size = fixed or _next_size(size, took)
        return found, seconds

    @cached_property
    def _partial(self) -> "_Partial":
        part = "" if self.world.size == 1 else f"-{self.world.rank}-of-{self.world.size}"
        return _Partial.of(self.subject, self.question, self.file, part)


def prediction_time(classifier: Classifier, images: Images) -> dict[str, float]:
    """How many images the deployed classifier predicted in one call, and in how many seconds.

    First of a single image, or of a whole batch where one image would take as long, then of eight times as many until a
    call takes `PREDICTED_SECONDS` or has all images: the last call counts, so that what is done once is done before or
    is a small part of it.
    """
    count = classifier.images_at_once()
    while True:
        began = time.perf_counter()
        classifier.predict(images[:count]).cpu()  # waits for the device
        seconds = time.perf_counter() - began
        if seconds >= PREDICTED_SECONDS or count >= len(images):
            return {"images": min(count, len(images)), "seconds": round(seconds, 6)}
        count *= 8


def _gathered(part: Certificates, rows: slice, total: int, world: World) -> Certificates:
    """The certificates of all processes; numbers are carried in types that sums with zero do not change."""
    if world.size == 1:
        return part
    columns = part.to_tensors()
    wide = {name: column.new_zeros(total, *column.shape[1:]) for name, column in columns.items()}
    for name, column in columns.items():
        wide[name][rows] = column
    sums = {
        name: value.to(torch.int32) if value.dtype == torch.bool else value for name, value in wide.items()
    }
    world.sum_in_place(list(sums.values()))
    joined = {name: value.to(columns[name].dtype) for name, value in sums.items()}
    return Certificates.from_tensors(joined, part.guarantee)


def certificate_columns(found: Certificates, positions: Tensor) -> dict[str, NDArray[Any]]:
    """The rows of evidence, in small types that hold them."""
    classes = {"label": found.labels, "prediction": found.predictions}
    classes |= {} if found.ballots is None else {"selected": found.ballots.selected}
    small = _smallest(*classes.values())
    columns = {
        "index": positions.numpy().astype(np.int32),
        **{name: each.cpu().numpy().astype(small) for name, each in classes.items()},
        "certified": found.certified.cpu().numpy(),
    }
    if found.radius is not None:
        columns["radius"] = found.radius.cpu().numpy().astype(np.int32)
    if found.ballots is not None:
        votes = found.ballots.estimation.cpu().numpy()
        columns["votes"] = votes.astype(np.min_scalar_type(int(votes.max())))
    numbers = {"margin": found.least_margin, "lead": found.lead, "broken": found.broken}
    columns |= {name: each.cpu().numpy() for name, each in numbers.items() if each is not None}
    pairs = {
        ("worst_top", "worst_left"): found.worst_placement,
        ("first_mask", "second_mask"): found.weakest_masks,
    }
    for names, pair in pairs.items():
        if pair is not None:
            least = np.promote_types(np.int16, _smallest(pair))
            columns |= zip(names, pair.cpu().numpy().astype(least).T, strict=True)
    if found.broken is not None and found.counterexamples is not None:
        columns |= _kept_images(found.counterexamples.float(), found.broken)
    return columns


def _smallest(*numbers: Tensor) -> np.dtype[Any]:
    """The smallest type with a sign that holds whole numbers of -1 and above."""
    return np.min_scalar_type(-1 - max(int(each.max()) for each in numbers))


def _kept_images(images: Images, kept: Annotated[Tensor, "n"]) -> dict[str, NDArray[Any]]:
    """The columns of images that are classified wrongly, and of the rows that they belong to."""
    rows = kept.nonzero().flatten()
    return {"adversarial": images[rows].cpu().numpy(), "adversarial_row": rows.cpu().numpy()}


@final
@dataclass(frozen=True)
class Attacking(_Measurement):
    """Attacks the images of a subject, block by block, and writes evidence to a file, if one is named.

    Finished blocks wait in a file beside it, as those of a `Certification` do, with the state of the random numbers, so
    that an interrupted attack ends with the rows of one that was not.

    `among` are the positions of images that are certified, where only those are attacked. With `save_images` the images
    that were right before the attack and are wrong after it are kept.
    """

    attack: Attack
    threat: AnyThreat
    seed: int = 0
    file: Path | None = None
    command: str = ""
    among: Tensor | None = None
    save_images: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def question(self) -> Question:
        attack, subject = {**self.attack.describe(), "seed": self.seed}, self.subject
        is_part = self.among is not None
        return Question("attack", self.threat, subject.selection, subject.describe(), attack, is_part)

    def run(self, progress: Progress | None = None) -> Evidence:
        """The evidence, with the seconds of earlier, interrupted calls counted in. Its file appears whole."""
        columns, seconds = self._attack(progress or _unheard)
        facts = {**self.extra, "command": self.command, "seconds": round(seconds, 3)}
        evidence = self.subject.evidence(self.question, columns, facts)
        evidence = evidence if self.file is None else evidence.write(self.file)
        self._partial.discard()
        return evidence

    @property
    def positions(self) -> Tensor:
        """Where the attacked images stand in their split."""
        return self.subject.positions() if self.among is None else self.among

    @property
    def kept(self) -> int:
        """How many images an interrupted attack has left attacked."""
        stored = self._partial.read()
        return 0 if stored is None else len(stored[0]["index"])

    def _attack(self, progress: Progress) -> tuple[dict[str, NDArray[Any]], float]:
        """The rows of all images, and the seconds that they took."""
        positions, generator = self.positions, Generator().manual_seed(self.seed)
        columns, seconds, total = {}, 0.0, len(positions)
        stored = self._partial.read()
        if stored is not None:
            tensors, notes = stored
            generator.set_state(tensors.pop("generator"))
            columns = {name: value.numpy() for name, value in tensors.items()}
            seconds = float(notes["seconds"])
        size = ATTACKED_ON_CPU if self.subject.device.type == "cpu" else ATTACKED_ELSEWHERE
        size = max(total, 1) if self.attack.needs_all_images else size
        while not columns or len(columns["index"]) < total:
            began, done = time.perf_counter(), len(columns.get("index", ()))
            progress(done, total)
            block = self._attack_block(positions[done : done + size], generator, progress, done)
            columns = _appended(columns, block)
            seconds += time.perf_counter() - began
            tensors = {name: torch.from_numpy(column) for name, column in columns.items()}
            self._partial.write({**tensors, "generator": generator.get_state()}, seconds)
        progress(total, total)
        return columns, seconds

    def _attack_block(
        self, positions: Tensor, generator: Generator, progress: Progress, done: int
    ) -> dict[str, NDArray[Any]]:
        images, attacked, total = self.subject.images(positions), self.subject.classifier, len(self.positions)

        def report(part: float, parts: int) -> None:
            progress(done + len(positions) * part / max(parts, 1), total)

        pixels = images.floats().to(_dtype_of(attacked))
        result = self.attack.run(attacked, pixels, images.labels, self.threat, generator, report)
        broken = result.succeeded & (result.clean_predictions == result.labels)
        images_kept = _kept_images(result.adversarial, broken) if self.save_images else {}
        return {**result.columns(positions), **images_kept}

    @cached_property
    def _partial(self) -> "_Partial":
        details = {"positions": self.positions.tolist(), "save_images": self.save_images}
        file = None if _is_foreign_attack(self.attack) else self.file
        return _Partial.of(self.subject, self.question, file, details=details)


def _appended(rows: dict[str, NDArray[Any]], block: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The rows with those of a further block below them."""
    if not rows:
        return block
    if "adversarial_row" in block:
        block = {**block, "adversarial_row": block["adversarial_row"] + len(rows["index"])}
    return {name: np.concatenate([column, block[name]]) for name, column in rows.items()}


def _dtype_of(attacked: Classifier | nn.Module) -> torch.dtype:
    """Float64 for models of that type, which take no other images; else float32."""
    dtype = weight_dtype(_model_of(attacked), torch.float32)
    return dtype if dtype == torch.float64 else torch.float32


def _model_of(attacked: Classifier | nn.Module) -> nn.Module:
    return attacked.model if isinstance(attacked, Classifier) else attacked


_ASKED = ("kind", "threat", "data", "classifier", "attack", "certified_only", "weights_sha256")
"""What a claim says of the question and the weights."""


@final
@dataclass(frozen=True)
class _Partial:
    """Blocks of work that has not ended, in a file that holds only what answers the very same claim."""

    file: Path | None
    claim: str

    @staticmethod
    def of(
        subject: Subject,
        question: Question,
        file: Path | None,
        part: str = "",
        details: Mapping[str, Any] | None = None,
    ) -> "_Partial":
        """Beside the evidence; nowhere where that has no file, or where data or code have no sum that tells of them."""
        if file is None or not subject.dataset.checksums or has_foreign_code(subject.classifier):
            return _Partial(None, "")
        model = _model_of(subject.classifier)
        claim = {**subject.evidence(question, {}, {}).meta, **(details or {})}
        sums = {"architecture": architecture(model), "numbers": _numbers(model), "code": source_sha256()}
        identity = {**claim, **sums}
        return _Partial(file.with_name(f"{file.name}.partial{part}"), json.dumps(identity, sort_keys=True))

    def read(self) -> tuple[dict[str, Tensor], Mapping[str, str]] | None:
        """What was kept, if anything, with its seconds and what else was noted of it."""
        if self.file is None or not self.file.is_file() or not source_sha256():
            return None
        try:
            with safe_open(self.file, framework="pt") as stored:
                notes = stored.metadata() or {}
                if notes.get("claim") != self.claim:
                    return None
                tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        except (SafetensorError, OSError):
            return None
        return tensors, notes

    @property
    def holds_other_work(self) -> bool:
        """Whether what was kept is of another question or other weights, on whatever machine and by whatever code."""
        if self.file is None or not self.file.is_file():
            return False
        try:
            with safe_open(self.file, framework="pt") as stored:
                theirs = json.loads((stored.metadata() or {}).get("claim", "{}"))
        except (SafetensorError, OSError):
            return False
        own = json.loads(self.claim)
        return any(theirs.get(name) != own.get(name) for name in _ASKED)

    def write(
        self, tensors: Mapping[str, Tensor], seconds: float, notes: Mapping[str, str] | None = None
    ) -> None:
        """Keep what is done so far."""
        if self.file is None:
            return
        noted = {"claim": self.claim, "seconds": repr(seconds), **(notes or {})}
        with atomic_write(self.file) as stream:
            stream.write(save({name: value.contiguous().cpu() for name, value in tensors.items()}, noted))

    def discard(self) -> None:
        """Remove the blocks, once what they say is written down elsewhere."""
        if self.file is not None:
            self.file.unlink(missing_ok=True)


def _unheard(done: float, total: int) -> None:
    """Progress that nobody asked for."""


def _shifted(progress: Progress, start: int, total: int) -> Progress:
    return lambda done, _: progress(start + done, total)


def _next_size(size: int, seconds: float) -> int:
    """About as many images as take `BLOCK_SECONDS`, but no leap from a block that was quick by chance."""
    wanted = int(size * BLOCK_SECONDS / max(seconds, 1e-3))
    return max(1, min(wanted, 8 * size, LARGEST_BLOCK))


def architecture(model: nn.Module) -> str:
    """A sum over every layer's type and settings, those that its printed form leaves out included."""
    lines = []
    for name, module in model.named_modules():
        settings = {
            key: repr(value)
            for key, value in sorted(vars(module).items())
            if isinstance(value, _PLAIN) and not key.startswith("_")
        }
        lines.append(f"{name}: {type(module).__module__}.{type(module).__qualname__} {settings}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _numbers(model: nn.Module) -> str:
    """A sum over every weight and buffer, with their types: those in memory may be others than in the file."""
    total = hashlib.sha256()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        total.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def has_foreign_code(classifier: Classifier | nn.Module) -> bool:
    """Whether the classifier, its layers, or rules that they may use, are of neither PyTorch nor this package."""
    layers = list(_model_of(classifier).modules())
    types = {type(classifier), *map(type, layers)}
    rules = [*FUNCTION_RULES.values(), *(LAYER_RULES[kind] for kind in types & LAYER_RULES.keys())]
    return any(map(_is_foreign, (*types, *rules))) or any(map(_has_code_of_its_own, layers))


def _is_foreign(code: Any) -> bool:  # noqa: ANN401 - a type or a function
    return code.__module__.partition(".")[0] not in ("torch", "patchcert")


def _has_code_of_its_own(layer: nn.Module) -> bool:
    """Whether it computes otherwise than its type says: as a graph or script of its own, or by hooks."""
    hooks = *layer._forward_hooks.values(), *layer._forward_pre_hooks.values()
    is_own = isinstance(layer, fx.GraphModule | torch.jit.ScriptModule) or "forward" in vars(layer)
    return is_own or bool(hooks)


def _is_foreign_attack(attack: Attack) -> bool:
    """Whether it, or an attack that it consists of, comes from elsewhere."""
    parts = [
        part
        for value in vars(attack).values()
        for part in (value if isinstance(value, list | tuple) else [value])
        if isinstance(part, Attack)
    ]
    return _is_foreign(type(attack)) or any(map(_is_foreign_attack, parts))
