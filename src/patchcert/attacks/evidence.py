"""The result of an attack as columns of numbers, one row per image."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from patchcert.attacks.base import AttackResult


def evidence_columns(result: AttackResult, index: Tensor) -> dict[str, NDArray[np.generic]]:
    """Rows as they stand in evidence files; `index` gives the images' positions in their data set."""
    columns = {
        "index": index,
        "label": result.labels,
        "prediction": result.clean_predictions,
        "prediction_after": result.predictions,
        "succeeded": result.succeeded,
        "top": result.placement[:, 0],
        "left": result.placement[:, 1],
        "margin": result.margins,
        "steps": result.steps,
    }
    return {name: column.cpu().numpy() for name, column in columns.items()}
