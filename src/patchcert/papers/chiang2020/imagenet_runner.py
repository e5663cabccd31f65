"""The pieces of the ImageNet table one after the other, in this process; a stop keeps what is finished."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from patchcert.errors import PatchcertError
from patchcert.papers.chiang2020.imagenet_attack import Material, attack_piece
from patchcert.papers.chiang2020.imagenet_plan import CornerPlan, Piece
from patchcert.papers.chiang2020.imagenet_results import CornerResult
from patchcert.papers.chiang2020.runner import State, StopOrder, Workshop


class PieceWatcher(Protocol):
    """Hears what becomes of pieces."""

    def piece_changed(self, piece: Piece, state: State, note: str) -> None:
        """A piece was started, or has come to some end."""
        ...

    def piece_passed(self, piece: Piece, words: str) -> None:
        """The network makes another pass over a batch of images."""
        ...


class _StopError(Exception):
    """Time is up, or a stop was ordered."""


class PieceRunner:
    """Carries out pieces; one that fails does not stop the others, one cut short leaves its finished defenses."""

    def __init__(self, shop: Workshop, watcher: PieceWatcher, stop: StopOrder) -> None:
        self.shop, self.watcher, self.stop = shop, watcher, stop
        self.states: dict[str, State] = {}
        self._materials: dict[tuple[str, int, int], Material] = {}

    def run(self, pieces: Sequence[Piece]) -> dict[str, State]:
        """What became of each piece."""
        self.states = {piece.plan.label: "waiting" for piece in pieces}
        for piece in pieces:
            if self._must_stop:
                break
            try:
                self._carry_out(piece)
            except _StopError:
                self._set(piece, "interrupted", "finished defenses are kept")
            except (PatchcertError, torch.OutOfMemoryError) as error:
                self._set(piece, "failed", str(error))
        return self.states

    @property
    def _must_stop(self) -> bool:
        deadline = self.shop.deadline
        return self.stop.is_given or (deadline is not None and time.monotonic() >= deadline)

    def _carry_out(self, piece: Piece) -> None:
        material = self._material(piece.plan)
        results = self.shop.results or self.shop.runs / "results"
        known = CornerResult(results / material.fingerprint(piece.plan))
        missing = tuple(name for name in piece.defenses if not known.has((name,)))
        if not missing:
            self._set(piece, "already done")
            return
        self._set(piece, "running")

        def tell(words: str) -> None:
            if self._must_stop:
                raise _StopError
            self.watcher.piece_passed(piece, words)

        began = time.monotonic()
        asked = replace(piece, defenses=missing)
        result = attack_piece(asked, material, torch.device(self.shop.device), results, tell)
        self._set(piece, "done", f"{_found(result)}, in {time.monotonic() - began:.0f} s")

    def _material(self, plan: CornerPlan) -> Material:
        """Read once for all sizes of patches."""
        key = (plan.network, plan.images, plan.seed)
        if key not in self._materials:
            self._materials[key] = Material.of(plan, self.shop.data_dir)
        return self._materials[key]

    def _set(self, piece: Piece, state: State, note: str = "") -> None:
        self.states[piece.plan.label] = state
        self.watcher.piece_changed(piece, state, note)


def require_material(pieces: Sequence[Piece], data_dir: Path | None) -> None:
    """Refuse before anything is run if a network or images are missing."""
    for plan in dict.fromkeys(piece.plan for piece in pieces):
        Material.of(plan, data_dir)


def _found(result: CornerResult) -> str:
    """The accuracies under attack of all cells."""
    return ", ".join(
        f"{name} {'adaptive' if adaptive else 'plain'} {rows.withstood / rows.total:.1%}"
        for (name, adaptive), rows in result.cells.items()
    )
