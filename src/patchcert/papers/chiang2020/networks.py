"""Results about networks that were not trained here: one folder for each network and threat."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, final

import numpy as np

from patchcert.errors import RunError
from patchcert.evidence.record import Evidence, EvidenceFolder, Question
from patchcert.evidence.results import SUMMARY, check_together, copy_evidence
from patchcert.files import copy_file, write_text
from patchcert.threats import Patch
from patchcert.train.run_folder import ENVIRONMENT, EVIDENCE

COLUMNS = ("undefended", "undefended_after")


def network_name(network: str, question: Question, weights: str, data: Mapping[str, str]) -> str:
    """The name of a folder of results: the network, the patch, and a sum over all else that both defenses share."""
    patch, attack = question.threat, question.attack["attack"]
    assert isinstance(patch, Patch)
    plan = {
        "network": network,
        "patch": patch.height,
        "images": question.selection.drawn,
        **{setting: attack[setting] for setting in ("steps", "step_size", "restarts")},
        "seed": question.selection.seed,
    }
    plain = {"plan": plan, "weights": weights, "data": dict(sorted(data.items()))}
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:8]
    return f"imagenet-{network}-{patch.height}x{patch.width}-{digest}"


@final
@dataclass(frozen=True)
class NetworkResult:
    """The evidence of attacks on one network with one size of patch."""

    path: Path

    @cached_property
    def evidence(self) -> tuple[Evidence, ...]:
        """All evidence, checked: of the weights, images and settings that named the folder."""
        found = EvidenceFolder(self.path).all()
        for each in found:
            missing = [name for name in COLUMNS if name not in each.columns]
            if missing:
                raise RunError(f"{each.where} lacks the column {missing[0]!r}", hint="attack again")
            name = network_name(
                each.meta["network"], each.question, each.weights, each.meta["data"]["sha256"]
            )
            if name != self.path.name:
                raise RunError(
                    f"{each.where} is not evidence of what its folder says",
                    hint="weights, data or settings were others; attack again",
                )
        check_together(found)
        return found

    def summary(self) -> dict[str, Any]:
        """Accuracies for people to look at."""
        first = self.evidence[0]
        return {
            "fingerprint": self.path.name,
            "images": first.total,
            "undefended_accuracy": float(np.mean(first.columns["undefended"] == first.columns["label"])),
            "cells": {each.question.name: _accuracies(each) for each in self.evidence},
            **{key: first.meta[key] for key in ("device", "versions", "weights_sha256", "source_sha256")},
        }


def with_seed(question: Question, seed: int) -> Question:
    """The same question with another draw of images, and other random numbers of the attack."""
    return replace(
        question, selection=replace(question.selection, seed=seed), attack={**question.attack, "seed": seed}
    )


def network_results(folder: Path, network: str) -> tuple[NetworkResult, ...]:
    """All results about a network."""
    return tuple(NetworkResult(path) for path in sorted(folder.glob(f"imagenet-{network}-*")))


def collect_network(run: Path, folder: Path, weights: str) -> NetworkResult:
    """Copies what attacks on a network left in a folder of runs to the results."""
    result = NetworkResult(folder / run.name)
    copy_evidence(run / EVIDENCE, result.path, weights, folder)
    copy_file(run / ENVIRONMENT, result.path / ENVIRONMENT)
    write_text(result.path / SUMMARY, json.dumps(result.summary(), indent=2) + "\n")
    return result


def initially_correct(evidence: Evidence) -> tuple[int, int]:
    """Of the images that the undefended network gets right, how many are right under attack, and how many are."""
    right = evidence.columns["undefended"] == evidence.columns["label"]
    return int(np.count_nonzero(right & ~evidence.columns["succeeded"])), int(np.count_nonzero(right))


def _accuracies(evidence: Evidence) -> dict[str, float]:
    kept, right = initially_correct(evidence)
    after = evidence.columns["undefended_after"] == evidence.columns["label"]
    return {
        "clean_accuracy": evidence.correct / evidence.total,
        "accuracy": evidence.withstood / evidence.total,
        "accuracy_of_initially_correct": kept / right if right else 0.0,
        "undefended_accuracy_after": float(np.mean(after)),
        "seconds": evidence.meta["seconds"],
    }
