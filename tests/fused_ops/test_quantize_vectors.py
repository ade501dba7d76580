# SPDX-License-Identifier: Apache-2.0
"""Codes, scales, amaxes byte for byte against vectors of TransformerEngine's Python reference."""

from pathlib import Path

import numpy as np
import torch

from fused_ops.formats import OperandSpec
from fused_ops.quantize import operand_amax, quantize
from fused_ops.testing import assert_bitwise_equal
from tools import check_vectors

SMALL = Path(__file__).parents[1] / "data" / "nvfp4_vectors_small.npz"


def cases(path):
    groups = check_vectors.group(check_vectors.load(str(path)))
    return [
        (case, tag) for case, tags in groups.items() for tag in tags if tag and "gemm" not in case
    ]


def test_every_array_of_every_case():
    arrays = check_vectors.load(str(SMALL))
    for case, tag in cases(SMALL):
        x = check_vectors.to_tensor(arrays[f"{case}.x"], f"{case}.x")
        spec, columns = check_vectors.parse_tag(tag)
        q = quantize(x, spec, columns=columns)
        stored = {p: torch.from_numpy(arrays[f"{case}.{tag}.{p}"]) for p in check_vectors.PARTS}
        assert_bitwise_equal(q.codes, stored["codes"], f"{case}.{tag} codes")
        assert_bitwise_equal(q.row_scales(), stored["scales"], f"{case}.{tag} scales")
        assert_bitwise_equal(q.amax.view(1), stored["amax"], f"{case}.{tag} amax")
        amax = operand_amax(x, spec, columns=columns)
        assert_bitwise_equal(amax.view(1), stored["amax"], f"{case}.{tag} operand_amax")


def test_every_tag_is_among_the_vectors():
    tags = {tag for _, tag in cases(SMALL)}
    rows = {f"row_{end}" for end in ("1x16", "16x16", "1x16_4over6_mae", "1x16_4over6_mse")}
    columns = {"col_1x16", "col_16x16", "col_1x16_rht16"}
    assert tags == rows | columns | {"row_16x16_4over6_mse"}


def test_tile_scales_transpose_with_the_matrix():
    arrays = np.load(SMALL)
    x = check_vectors.to_tensor(arrays["13.x"], "x")
    spec = OperandSpec(format="nvfp4", block=(16, 16))
    turned = quantize(x, spec).transposed()
    direct = quantize(x, spec, columns=True)
    assert_bitwise_equal(turned.codes, direct.codes)
    assert_bitwise_equal(turned.scales, direct.scales)
    assert turned.shape == direct.shape
