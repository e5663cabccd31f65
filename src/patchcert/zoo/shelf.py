"""A folder of models with their cards, the package's own among them. Reading one never runs code."""

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import final

from torch import nn

from patchcert.errors import ModelError, PatchcertError, did_you_mean
from patchcert.files import sha256, write_together
from patchcert.models import load as load_model
from patchcert.zoo.card import Card

LARGEST = 35_000_000


@final
@dataclass(frozen=True, slots=True)
class Zoo:
    """Pairs of NAME.safetensors and NAME.json in one folder, which need not exist while it is empty."""

    folder: Path

    def names(self) -> tuple[str, ...]:
        """All models with a card, sorted."""
        return tuple(sorted(file.stem for file in self.folder.glob("*.json")))

    def require_models(self) -> None:
        """Refuse a folder that is not there, or holds no models."""
        if not self.folder.is_dir():
            raise ModelError(f"there is no folder {self.folder}", hint="name a folder of models with cards")
        if not self.names():
            raise ModelError(
                f"{self.folder} holds no models with cards",
                hint=f"add one: patchcert zoo add RUN --zoo {self.folder}",
            )

    def weights(self, name: str) -> Path:
        """The file of a model's weights."""
        return self._known(name).with_suffix(".safetensors")

    def card(self, name: str) -> Card:
        """The card of a model; one that contradicts itself is refused."""
        file = self._known(name)
        try:
            card = Card.from_dict(json.loads(file.read_text(encoding="utf-8")))
        except (AttributeError, TypeError, ValueError, PatchcertError) as error:
            reason = error.message if isinstance(error, PatchcertError) else str(error)
            raise ModelError(f"the card {file} cannot be read: {reason}") from error
        if card.name != name:
            raise ModelError(f"the card {file} is of {card.name!r}")
        return card

    def load(self, name: str) -> nn.Sequential:
        """The model on the CPU in eval mode, its file checked against the card."""
        card, weights = self.card(name), self.weights(name)
        if not weights.is_file() or sha256(weights) != card.weights_sha256:
            what = (
                "is missing"
                if not weights.is_file()
                else "does not have the SHA-256 sum that its card states"
            )
            raise ModelError(f"the model file {weights} {what}", hint="install patchcert again")
        model, spec = load_model(weights)
        if spec != card.model:
            raise ModelError(f"the model file {weights} describes another model than its card")
        return model

    def size(self, without: str = "") -> int:
        """Bytes of all files, those of one model left out."""
        files = (*self.folder.glob("*.safetensors"), *self.folder.glob("*.json"))
        return sum(file.stat().st_size for file in files if file.stem != without)

    def put(self, card: Card, weights: Path) -> None:
        """Store a model under its card's name, in place of one that has it, within the size of the zoo."""
        text = (json.dumps(card.to_dict(), indent=2) + "\n").encode()
        total = self.size(without=card.name) + weights.stat().st_size + len(text)
        if total > LARGEST:
            raise ModelError(
                f"with {card.name} the zoo in {self.folder} would grow to {total / 1e6:.1f} MB; it may have "
                f"{LARGEST / 1e6:.0f}",
                hint="take a smaller model, or remove one first",
            )
        target = self.folder / f"{card.name}.json"
        write_together({target.with_suffix(".safetensors"): weights.read_bytes(), target: text})

    def _known(self, name: str) -> Path:
        """The card of a name, which must be there."""
        known = self.names()
        if name in known:
            return self.folder / f"{name}.json"
        self.require_models()
        raise ModelError(
            f"there is no model named {name!r} in the zoo; known: {', '.join(known)}",
            hint=f"{did_you_mean(name, known)} A file of your own is loaded with patchcert.models.load(path).".strip(),
        )


def shipped() -> Zoo:
    """The models that come with the package."""
    return Zoo(Path(str(resources.files("patchcert.zoo"))) / "entries")


def names() -> tuple[str, ...]:
    """The models that come with the package, sorted."""
    return shipped().names()


def card(name: str) -> Card:
    """What was counted for a model that comes with the package, and how it was trained."""
    return shipped().card(name)


def load(name: str) -> nn.Sequential:
    """A trained model that comes with the package, on the CPU in eval mode; `names` lists them."""
    return shipped().load(name)
