# SPDX-License-Identifier: Apache-2.0
"""What waits is taken together, and places hold the sums of what came, in its order."""

import math

import torch

from pretrain.numerics_sums import Batches, Table


def test_things_of_one_key_are_taken_together():
    taken = []
    batches = Batches(lambda things: taken.append(list(things)), together=8, most=100)
    for number in range(10):
        batches.add("even" if number % 2 == 0 else "odd", number, 1)
    batches.add(None, "large", 1000)
    assert taken == [["large"]], "the others wait"
    for number in range(10, 16):
        batches.add("even", number, 1)
    assert taken[1:] == [[0, 2, 4, 6, 8, 10, 11, 12]]
    batches.add("odd", 17, 3)
    assert taken[2:] == [[1, 3, 5, 7, 9, 17]], "their size counts, and not their number"
    batches.finish()
    assert taken[3:] == [[13, 14, 15]]
    batches.finish()
    assert len(taken) == 4, "nothing is taken twice"


def test_no_more_waits_than_fits():
    """Experts with other numbers of tokens each have a key of their own: the oldest go first."""
    taken = []
    batches = Batches(lambda things: taken.append(list(things)), together=100, most=10)
    for number in range(4):
        batches.add(number % 3, number, 3)
    assert taken == [[0, 3]], "9 and 3 are more than 10"
    batches.add("wide", "wide", 11)
    assert taken[1:] == [[1], [2], ["wide"]]
    batches.add(1, 4, 10)
    assert len(taken) == 4, "what was taken is not held"
    batches.finish()
    batches.add(2, 5, 10)
    assert taken[4:] == [[4]]


def test_a_place_holds_the_sum_of_what_came_in_order():
    """Values whose sum depends on its order: one place takes five, others none or one."""
    table = Table((2, 3, 2), torch.device("cpu"))
    values = torch.tensor([1e16, 1.0, -1e16, 1.0, 3.0], dtype=torch.float64)
    wanted = 0.0
    for value in values.tolist():
        table.add([(1, 2)], torch.tensor([[value, -value]], dtype=torch.float64))
        wanted += value
    table.add([(0, 0), (1, 0)], torch.tensor([[5.0, 6.0], [7.0, 8.0]]))
    total = table.total()
    assert total[1, 2].tolist() == [wanted, -wanted]
    assert total[0, 0].tolist() == [5.0, 6.0]
    assert total[1, 0].tolist() == [7.0, 8.0]
    assert total[0, 1].tolist() == [0.0, 0.0]
    table.add([(0, 1)], torch.ones(1, 2))
    assert table.total()[0, 1].tolist() == [1.0, 1.0], "what was added is added once"
    assert table.total()[1, 0].tolist() == [7.0, 8.0]


def test_the_largest_of_what_came_and_a_nan_that_stays():
    table = Table((3, 1), torch.device("cpu"), torch.maximum)
    for value in (2.0, 7.0, 3.0):
        table.add([(0,)], torch.tensor([[value]]).bfloat16())
        table.add([(1,)], torch.tensor([[math.nan if value == 7.0 else value]]))
    assert table.total()[0, 0] == 7.0
    assert math.isnan(table.total()[1, 0])
    assert table.total()[2, 0] == 0.0
