# SPDX-License-Identifier: Apache-2.0
import itertools
from dataclasses import replace

import pytest
import torch

from fused_ops.formats import OperandSpec
from fused_ops.keys import (
    STREAMS,
    KeyTable,
    StreamKey,
    philox4x32,
    sign_key,
    signs,
    stable_id,
)
from fused_ops.quantize.hadamard import FIXED_SIGNS

KEY = StreamKey(seed=7, step=100, micro_batch=3, layer=stable_id("layers.3.mlp"), expert=2)
MICRO_BATCH = OperandSpec(format="nvfp4", hadamard=128, signs="micro_batch")
STEP = OperandSpec(format="nvfp4", hadamard=128, signs="step")


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_known_answers(counter, key, words):
    """The vectors published with Random123."""
    assert philox4x32(counter, key) == words


def test_every_field_and_operand_gives_another_key():
    grid = itertools.product((0, 1, 2**40), (0, 1, 2**33), (0, 1, 5), (0, 1, 2**50), (0, 1, 63))
    keys = [StreamKey(*values) for values in grid]
    words = [key.operand(name) for key in keys for name in STREAMS if not name.endswith(".w")]
    assert len(set(words)) == len(words)


def test_weight_keys_hold_for_all_micro_batches_of_a_step():
    later = replace(KEY, micro_batch=9)
    for name in ("fprop.w", "dgrad.w"):
        assert KEY.operand(name) == later.operand(name)
        assert KEY.operand(name) != replace(KEY, step=101).operand(name)
    assert KEY.operand("dgrad.dy") != later.operand("dgrad.dy")


def test_row_and_column_streams_of_a_gradient_differ():
    assert KEY.operand("dgrad.dy") != KEY.operand("wgrad.dy")


def test_bits_of_keys_are_balanced():
    words = [w for i in range(1000) for w in replace(KEY, micro_batch=i).operand("wgrad.dy")]
    ones = sum(word.bit_count() for word in words)
    expected, sigma = 16 * len(words), (8 * len(words)) ** 0.5
    assert abs(ones - expected) < 4 * sigma


def test_keys_are_part_of_the_definition_of_a_run():
    """Pinned: a change would give every continued run other dither."""
    assert stable_id("layers.3.mlp") == 1859685494823611842
    assert KEY.operand("dgrad.dy") == (3467071921, 1350604701)
    assert KEY.operand("fprop.w") == (421748071, 94812122)


@pytest.mark.parametrize(
    ("field", "value"), [("seed", -1), ("micro_batch", 2**32), ("expert", 2**32), ("layer", 2**64)]
)
def test_fields_out_of_range_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} must be in .* got {value}; take it modulo"):
        StreamKey(**{field: value})


def test_fixed_signs_are_transformer_engines():
    assert FIXED_SIGNS == (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
    assert signs(OperandSpec(format="nvfp4", hadamard=16), KEY, "wgrad") is None
    assert signs(OperandSpec(format="nvfp4"), KEY, "wgrad") is None


def test_signs_are_resampled_as_often_as_they_say():
    """Counted: ten steps of eight micro-batches have 80 vectors of one period, 10 of the other."""
    calls = [replace(KEY, step=s, micro_batch=m) for s in range(10) for m in range(8)]
    per_micro_batch = {tuple(signs(MICRO_BATCH, key, "wgrad").tolist()) for key in calls}
    per_step = {tuple(signs(STEP, key, "dgrad").tolist()) for key in calls}
    assert len(per_micro_batch) == 80
    assert len(per_step) == 10
    values = torch.tensor([list(v) for v in per_micro_batch])
    assert set(values.unique().tolist()) == {-1.0, 1.0}
    # Mean of 80 * 128 fair signs: standard deviation 0.0099.
    assert abs(float(values.mean())) < 0.04


def test_both_operands_of_a_gemm_share_signs_and_gemms_do_not():
    dy = replace(MICRO_BATCH, rounding="ms_eden")
    assert torch.equal(signs(MICRO_BATCH, KEY, "wgrad"), signs(dy, KEY, "wgrad"))
    assert not torch.equal(signs(MICRO_BATCH, KEY, "wgrad"), signs(MICRO_BATCH, KEY, "dgrad"))


def test_signs_do_not_depend_on_the_expert_but_on_the_layer():
    assert sign_key(STEP, KEY, "dgrad") == sign_key(STEP, replace(KEY, expert=5), "dgrad")
    assert sign_key(STEP, KEY, "dgrad") != sign_key(STEP, replace(KEY, layer=5), "dgrad")


def test_micro_batches_in_flight_keep_their_own_signs():
    """Forwards of four micro-batches, then their backwards: each finds the vector it began with."""
    forward = [signs(MICRO_BATCH, replace(KEY, micro_batch=m), "wgrad") for m in range(4)]
    backward = [signs(MICRO_BATCH, replace(KEY, micro_batch=m), "wgrad") for m in range(4)]
    assert all(torch.equal(a, b) for a, b in zip(forward, backward))
    assert len({tuple(v.tolist()) for v in forward}) == 4


def test_a_table_gives_the_words_of_any_step():
    """Places stay where they are; refresh writes the words of another step there."""
    table = KeyTable("cpu", room=3)
    kept = replace(KEY, table=table)
    place = kept.operand("dgrad.dy")
    assert tuple(place.tolist()) == KEY.operand("dgrad.dy")
    turned = signs(MICRO_BATCH, kept, "wgrad")
    assert torch.equal(turned, signs(MICRO_BATCH, KEY, "wgrad"))
    assert len(table) == 2
    later = replace(KEY, step=KEY.step + 5)
    table.refresh(later.seed, later.step)
    assert tuple(place.tolist()) == later.operand("dgrad.dy")
    assert kept.operand("dgrad.dy").data_ptr() == place.data_ptr()
    assert torch.equal(signs(MICRO_BATCH, kept, "wgrad"), signs(MICRO_BATCH, later, "wgrad"))
    kept.operand("wgrad.dy")
    with pytest.raises(ValueError, match="more than 3 operands"):
        replace(kept, expert=1).operand("wgrad.dy")
