# SPDX-License-Identifier: Apache-2.0
"""What the tools' command lines share: quiet packages, and refusals in words."""

import logging
import sys
import warnings


def prepare() -> None:
    """Lets megatron-core be imported after this, and keeps other packages' notices back."""
    for name in ("megatron", "torch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    from pretrain import cpu_compat  # only now: it takes seconds to import

    cpu_compat.enable()


def refused(error: Exception) -> int:
    """Says every problem of an error that the user can mend; gives the exit status of one."""
    for problem in getattr(error, "problems", [str(error)]):
        print(f"error: {problem}", file=sys.stderr)
    return 2
