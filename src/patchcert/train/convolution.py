"""Convolutions of few channels as single kernels, for which libraries have no good ones.

The plain twin of `small_convolution` is `F.conv2d`; they are held equal by tests on machines with CUDA.
"""

from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from patchcert.windows.kernels import is_fused

_MOST_CHANNELS = 64
_MOST_TAPS = 63
"""Each is a bit of a number."""
_MOST_NUMBERS = 2**31
"""The kernels count in 32 bits."""
_PLACES = 128
"""Of a program, a thread for each: then entries are known to the compiler, and most addresses cost nothing."""

_PROGRAMS, _MOST_PARTS = 1056, 512
"""What the places are shared out to: enough to fill a large device, not so many that their sum takes longer."""


class SmallConv2d(nn.Conv2d):
    """The same layer with kernels of its own on CUDA, in TF32 whatever the process allows.

    So it is for guesses, and never for bounds.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Of the images (n, c, h, w); by the library where the kernels do not apply."""
        if not self._is_small(input):
            return super().forward(input)
        return small_convolution(input, self.weight, self.bias, self.stride[0], int(self.padding[0]))

    def _is_small(self, images: Tensor) -> bool:
        is_plain = self.groups == 1 and self.dilation == (1, 1) and self.padding_mode == "zeros"
        is_square = self.stride[0] == self.stride[1] and self.padding[0] == self.padding[1]
        is_whole = images.dim() == 4 and images.numel() > 0 and images.shape[1] == self.in_channels
        if not (is_plain and is_square and is_whole and is_fused(images) and is_fused(self.weight)):
            return False
        height, width = self.kernel_size
        shrinks = 2 * int(self.padding[0]) < min(height, width)
        channels = max(self.in_channels, self.out_channels)
        numbers = images.shape[0] * images.shape[2] * images.shape[3] * channels
        is_counted = height * width <= _MOST_TAPS and numbers < _MOST_NUMBERS
        return shrinks and is_counted and channels <= _MOST_CHANNELS


def small_convolution(
    images: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int, precision: str = "tf32"
) -> Tensor:
    """As `F.conv2d` on float32 images (n, c, h, w), with a gradient by each of the three.

    The precision is that of the products: "tf32", or "tf32x3" which has nearly float32's. Sums are in float32 and
    in the same order every time.
    """
    return _SmallConvolution.apply(images, weight, bias, stride, padding, precision)  # pyright: ignore[reportReturnType]


@dataclass(frozen=True, slots=True)
class _Reach:
    """Where the kernel lies on its source for each place of the output; in the words of the kernels."""

    CHANNELS: int
    SOURCE_ROWS: int
    SOURCE_COLUMNS: int
    ROWS: int
    COLUMNS: int
    KERNEL_ROWS: int
    KERNEL_COLUMNS: int
    STRIDE: int
    SPREAD: int
    TOP: int
    LEFT: int

    @staticmethod
    def forwards(images: Tensor, weight: Tensor, stride: int, padding: int) -> "_Reach":
        """Of the convolution itself."""
        channels, height, width = images.shape[1:]
        down, right = weight.shape[2:]
        rows, columns = (height + 2 * padding - down) // stride, (width + 2 * padding - right) // stride
        return _Reach(
            channels, height, width, rows + 1, columns + 1, down, right, stride, 1, padding, padding
        )  # fmt: skip

    def backwards(self, width: int) -> "_Reach":
        """Of the convolution of the gradient, which has so many channels, that gives the images' gradient."""
        return _Reach(
            width, self.ROWS, self.COLUMNS, self.SOURCE_ROWS, self.SOURCE_COLUMNS, self.KERNEL_ROWS,
            self.KERNEL_COLUMNS, 1, self.STRIDE, self.KERNEL_ROWS - 1 - self.TOP, self.KERNEL_COLUMNS - 1 - self.LEFT,
        )  # fmt: skip

    @property
    def taps(self) -> int:
        return self.KERNEL_ROWS * self.KERNEL_COLUMNS

    def blocks(self, least: int) -> dict[str, int]:
        """As many channels at once as have at most 64 entries, blocks alike, of at least so many entries."""
        count = -(-self.CHANNELS // max(1, 64 // self.taps))
        channels = -(-self.CHANNELS // count)
        return {"AT_ONCE": channels, "ENTRIES": max(least, 1 << (channels * self.taps - 1).bit_length())}


class _SmallConvolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        images: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: int,
        padding: int,
        precision: str,
    ) -> Tensor:
        images, weight = images.contiguous(), weight.contiguous()
        reach = _Reach.forwards(images, weight, stride, padding)
        ctx.save_for_backward(images, weight)
        ctx.rest = (reach, bias is not None, precision)  # pyright: ignore[reportAttributeAccessIssue]
        return _convolved(images, weight, bias, reach, precision)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: FunctionCtx, gradient: Tensor
    ) -> tuple[Tensor | None, ...]:
        images, weight = ctx.saved_tensors  # pyright: ignore[reportAttributeAccessIssue]
        reach, has_bias, precision = ctx.rest  # pyright: ignore[reportAttributeAccessIssue]
        needs = ctx.needs_input_grad  # pyright: ignore[reportAttributeAccessIssue]
        gradient = gradient.contiguous()
        to_images = to_weight = to_bias = None
        if needs[0]:
            back = reach.backwards(len(weight))
            to_images = _convolved(gradient, weight, None, back, precision, is_turned=True)
        if needs[1] or needs[2]:
            flat = _correlated(images, gradient, reach, has_bias, precision)
            to_weight = flat[: weight.numel()].view(weight.shape)
            to_bias = flat[weight.numel() :] if has_bias else None
        return to_images, to_weight, to_bias, None, None, None


def _convolved(
    maps: Tensor, weight: Tensor, bias: Tensor | None, reach: _Reach, precision: str, is_turned: bool = False
) -> Tensor:
    from patchcert.train.kernels import convolve_maps

    width = weight.shape[1] if is_turned else weight.shape[0]
    output = maps.new_empty(len(maps), width, reach.ROWS, reach.COLUMNS)
    count = output.numel() // width
    block = 32 if width > 16 and count >= 2**15 else 16
    convolve_maps[(-(-count // _PLACES), -(-width // block))](  # pyright: ignore[reportIndexIssue]
        maps,
        weight,
        weight if bias is None else bias,
        output,
        count,
        **asdict(reach),
        **reach.blocks(2 * block),
        WIDTH=width,
        IS_TURNED=is_turned,
        HAS_BIAS=bias is not None,
        PRECISION=precision,
        PLACES=_PLACES,
        BLOCK=block,
        num_warps=_PLACES // 32,
        num_stages=1,
    )
    return output


def _correlated(maps: Tensor, gradient: Tensor, reach: _Reach, has_bias: bool, precision: str) -> Tensor:
    """The gradients by weights and bias, one after the other in one row."""
    from patchcert.train.kernels import correlate_maps

    width, count = gradient.shape[1], gradient.numel() // gradient.shape[1]
    blocks = reach.blocks(32)
    others = -(-reach.CHANNELS // blocks["AT_ONCE"]), -(-width // 16)
    chunks = -(-count // _PLACES)
    steps = max(2, -(-chunks * others[0] * others[1] // _PROGRAMS), -(-chunks // _MOST_PARTS))
    slices = -(-chunks // steps)
    parts = maps.new_empty(slices, width * (reach.CHANNELS * reach.taps + has_bias))
    correlate_maps[(slices, *others)](  # pyright: ignore[reportIndexIssue]
        maps,
        gradient,
        parts,
        count,
        steps,
        **asdict(reach),
        **blocks,
        WIDTH=width,
        HAS_BIAS=has_bias,
        PRECISION=precision,
        PLACES=_PLACES,
        BLOCK=16,
        num_warps=_PLACES // 32,
        num_stages=1,
    )
    return parts.sum(dim=0)
