# SPDX-License-Identifier: Apache-2.0
"""Inputs shared by tests, benchmarks and figures: kinds of data and ugly shapes."""

from collections.abc import Callable

import torch
from torch import Tensor

SHAPES = [(16, 16), (64, 128), (128, 32), (32, 272), (1, 16), (1, 1), (3, 5), (17, 33), (130, 250)]
"""Matrices: whole blocks, single rows, and sizes that no block divides."""

SHAPE_IDS = [f"{rows}x{cols}" for rows, cols in SHAPES]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gaussian(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=_generator(seed))


def laplace(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Exponential magnitudes with random signs."""
    first, second = torch.rand((2, *shape), generator=_generator(seed)).clamp_(min=1e-7).log_()
    return first - second


def student_t3(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Student's t with 3 degrees of freedom: heavy tails, finite variance."""
    z = torch.randn((4, *shape), generator=_generator(seed))
    return z[0] / (z[1:].square().sum(0) / 3).sqrt()


def relu_squared(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """What a ReLU squared activation gives: half zeros, a long tail."""
    return gaussian(shape, seed).relu().square()


def outliers(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Gaussian, with one element in 256 a hundred times larger."""
    x = gaussian(shape, seed)
    chosen = torch.rand(shape, generator=_generator(seed + 1)) < 1 / 256
    return torch.where(chosen, 100 * x, x)


def outlier_columns(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Gaussian, with every 37th column a thousand times larger."""
    x = gaussian(shape, seed)
    x[..., ::37] *= 1000
    return x


def channel_scaled(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Gaussian columns with lognormal scales (sigma 1.5)."""
    scale = torch.randn(shape[-1], generator=_generator(seed + 1)).mul(1.5).exp()
    return gaussian(shape, seed) * scale


def wide(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Magnitudes spread evenly over 40 binades: block scales under- and overflow."""
    exponent = torch.rand(shape, generator=_generator(seed + 1)) * 40 - 20
    return gaussian(shape, seed).sign() * torch.exp2(exponent)


def ties(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Multiples of 0.25 up to 6: with a scale of one many lie between two codes."""
    return torch.randint(-24, 25, shape, generator=_generator(seed)) / 4


def zeros(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.zeros(shape)


def one_hot(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """A single nonzero element."""
    x = torch.zeros(shape)
    x.view(-1)[seed % x.numel()] = 7.3
    return x


def zero_blocks(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Gaussian, with the second and every fourth block of 16 columns zero."""
    x = gaussian(shape, seed)
    for start in range(16, shape[-1], 64):
        x[..., start : start + 16] = 0
    return x


def tiny(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Around 1e-36, where 2688 / amax overflows fp32."""
    return gaussian(shape, seed) * 1e-36


def denormal(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Fp32 and bf16 subnormals."""
    return gaussian(shape, seed) * 1e-39


def huge(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Up to about 1e38, near the largest fp32 number."""
    return (gaussian(shape, seed) * 2e37).clamp(-2e38, 2e38)


KINDS: dict[str, Callable[..., Tensor]] = {
    f.__name__: f
    for f in (
        gaussian,
        laplace,
        student_t3,
        relu_squared,
        outliers,
        outlier_columns,
        channel_scaled,
        wide,
        ties,
        zeros,
        one_hot,
        zero_blocks,
        tiny,
        denormal,
        huge,
    )
}


def make_input(
    kind: str, shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """A CPU tensor of one of KINDS; the same for the same arguments."""
    return KINDS[kind](shape, seed).to(dtype)
