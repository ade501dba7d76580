# SPDX-License-Identifier: Apache-2.0
"""A run whose GEMMs sum in another order: `python -m pretrain.parity.ordered SEED CONFIG [...]`.

As `python -m pretrain CONFIG [section.key=value ...]`, inside `summed_in_halves(SEED)`. What lies
between such a run and the plain one is what rounding alone does to a trajectory.
"""

import sys
from collections.abc import Sequence

from pretrain import cpu_compat
from pretrain.__main__ import main as train


def main(arguments: Sequence[str]) -> int:
    """The program; returns its exit status, as `python -m pretrain` does."""
    if len(arguments) < 2 or not arguments[0].isdecimal():
        print("usage: python -m pretrain.parity.ordered SEED CONFIG [...]", file=sys.stderr)
        return 2
    cpu_compat.enable()
    from pretrain.parity.orders import summed_in_halves

    with summed_in_halves(int(arguments[0])):
        return train(arguments[1:])


if __name__ == "__main__":  # saving a checkpoint starts processes that import this file
    sys.exit(main(sys.argv[1:]))
