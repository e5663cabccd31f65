"""Shapes of tensors as signatures state them: `Annotated[Tensor, "n c h w"]`. Tests check them in every call.

A shape is a row of words, one for each dimension. Within one call a name stands for one number, a number for itself,
`_` for any one dimension, and `...` (at most once) for any dimensions. The same letters mean the same everywhere:
n images, c channels, h height, w width, p placements, k classes.
"""

from typing import Annotated

from torch import Tensor

Images = Annotated[Tensor, "n c h w"]
PerImage = Annotated[Tensor, "n"]
Labels = Annotated[Tensor, "n"]
Logits = Annotated[Tensor, "n k"]
Margins = Annotated[Tensor, "n k"]
PlacementMargins = Annotated[Tensor, "n p k"]
Corners = Annotated[Tensor, "p 2"]

Epsilon = float | Tensor
"""How far a pixel may change: a number, or a tensor of one."""
