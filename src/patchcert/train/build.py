"""From the words of a specification to the objects that train."""

from pathlib import Path

import torch
from torch import Generator, nn

from patchcert.data import Dataset, Split, load_dataset
from patchcert.errors import DataError, SpecError
from patchcert.models import ModelSpec, Normalize
from patchcert.threats import Patch, SparsePixels
from patchcert.train.loop import derived_seed
from patchcert.train.spec import (
    AblatedTraining,
    AllTraining,
    DataChoice,
    GuidedTraining,
    ModelChoice,
    PooledTraining,
    RandomTraining,
    SparseTraining,
    Spec,
)
from patchcert.train.step import StepSettings
from patchcert.train.strategies import (
    Ablated,
    AllPlacements,
    GuidedPlacements,
    Natural,
    PooledPlacements,
    RandomPlacements,
    SparseChanges,
)
from patchcert.train.strategy import Strategy
from patchcert.train.unet import MarginUNet, build_unet


def load_data(choice: DataChoice, data_dir: Path | None) -> Dataset:
    """The chosen data set, its images in the chosen size; refused unless there is something to train on."""
    dataset = load_dataset(choice.name, data_dir, choice.image_shape)
    choose_data(dataset, choice)
    return dataset


def choose_data(dataset: Dataset, choice: DataChoice) -> tuple[Split, Split | None]:
    """The images to train on and those held out, if any; the test set is never among them."""
    if len(dataset.train) == 0:
        raise DataError(
            f"{dataset.name} has no training images: all {len(dataset.test)} are test images",
            hint="put images to train on below train/ and others below test/ (or val/), in the same classes.",
        )
    if not choice.validation:
        return dataset.train.take(choice.limit or len(dataset.train)), None
    kept, held_out = dataset.split_validation(choice.validation)
    return kept.take(choice.limit or len(kept)), held_out


def describe_model(choice: ModelChoice, dataset: Dataset) -> ModelSpec:
    """The chosen architecture for the data's images and classes."""
    channels, height, width = dataset.train.image_size
    mean, std = dataset.normalisation() if choice.normalise else ((), ())
    return ModelSpec(
        name=choice.name,
        channels=channels,
        height=height,
        width=width,
        classes=len(dataset.classes),
        hidden=choice.hidden,
        mean=mean,
        std=std,
    )


def build_strategy(spec: Spec, model: ModelSpec) -> Strategy:
    """The chosen strategy against the chosen threat."""
    windows = torch.bfloat16 if spec.optimiser.windows == "bfloat16" else None
    match spec.strategy, spec.threat:
        case AllTraining(), Patch() as threat:
            return AllPlacements(threat, windows)
        case RandomTraining() as choice, Patch() as threat:
            return RandomPlacements(threat, choice.placements, windows)
        case GuidedTraining() as choice, Patch() as threat:
            helper = _helper(choice, model, spec.seed)
            return GuidedPlacements(threat, helper, choice.per_class, choice.inverse_temperature, windows)
        case PooledTraining() as choice, Patch() as threat:
            return PooledPlacements(threat, choice.blocks)
        case SparseTraining() as choice, SparsePixels() as threat:
            return SparseChanges(threat, choice.bound)
        case AblatedTraining() as choice, SparsePixels():
            _check_ablated(choice, spec, model)
            return Ablated(choice.retained, choice.masks, choice.bfloat16)
        case choice, threat if choice.kind != "natural":
            raise SpecError(f"the strategy {choice.kind!r} cannot train against {threat}")
    return Natural()


def step_settings(spec: Spec) -> StepSettings:
    """What every training step does alike."""
    optimiser, data = spec.optimiser, spec.data
    return StepSettings(
        batch_size=optimiser.batch_size,
        weight_decay=optimiser.weight_decay,
        momentum=optimiser.momentum,
        clip_norm=optimiser.clip_norm,
        natural_weight=optimiser.natural_weight,
        tf32=optimiser.tf32,
        flip=data.flip,
        crop_padding=data.crop_padding,
    )


def check_votes(model: nn.Module, spec: ModelSpec) -> None:
    """The model takes ablated images in their encoding of twice the channels, or this says that it does not."""
    blank = torch.zeros(1, 2 * spec.channels, spec.height, spec.width)
    try:
        with torch.no_grad():
            model(blank.to(next(model.parameters()).device))
    except RuntimeError as error:
        raise SpecError(
            f"the model {spec.name!r} does not take ablated images, encoded in {2 * spec.channels} channels",
            hint="set model.name to cnn2_ablation or resnet18_ablation",
        ) from error


def _check_ablated(choice: AblatedTraining, spec: Spec, model: ModelSpec) -> None:
    if spec.schedule.epsilon.full_from:
        raise SpecError(
            "the strategy 'ablated' has no epsilon, but the schedule has natural or ramp epochs",
            hint="set schedule.epsilon.natural_epochs = 0 and schedule.epsilon.ramp_epochs = 0",
        )
    if choice.retained > model.height * model.width:
        raise SpecError(
            f"{choice.retained} pixels cannot be retained in images of {model.height}x{model.width}",
            hint="set strategy.retained to fewer",
        )


def _helper(choice: GuidedTraining, model: ModelSpec, seed: int) -> MarginUNet:
    width = choice.width or (6 if model.channels == 1 else 10)
    normalise = Normalize(model.mean, model.std) if model.normalises else None
    generator = Generator().manual_seed(derived_seed(seed, "helper"))
    return build_unet(model.channels, model.classes, width, generator, normalise)
