# SPDX-License-Identifier: Apache-2.0
"""`python -m pretrain CONFIG [key=value ...]`, the same under torchrun.

CONFIG is a YAML file; each `section.key=value` overrides one of its settings. Exit status: 0 when
the run has ended or was stopped by a signal and saved, 2 when the user can mend what is wrong, 75
when a rank hung and the run should be started again, 1 for everything else.
"""

import errno
import logging
import os
import re
import socket
import sys
import warnings
from collections.abc import Sequence

from fused_ops.errors import ConfigError
from pretrain import cpu_compat
from pretrain.logs import log_to_stderr
from pretrain.redact import mask_text

_NAMES_A_RANK = re.compile(r"\brank \d+ \(")
_USAGE = "usage: python -m pretrain CONFIG.yaml [section.key=value ...]"
# What the machine says when a user's folder or disk cannot take what is written.
_USERS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG)


def main(arguments: Sequence[str]) -> int:
    """Runs what the command line asks for; returns the exit status."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"{_USAGE}\n\n{__doc__.split(chr(10), 2)[2].strip()}")
        return 0 if arguments else 2
    _quiet()
    cpu_compat.enable()  # before megatron-core is imported, here and in the rooms below
    try:
        from pretrain.run import run

        return run(arguments[0], arguments[1:])
    except ConfigError as error:
        return _say(error.problems)
    except OSError as error:
        if error.errno not in _USERS:
            raise
        where = f" at {error.filename}" if error.filename else ""
        return _say([f"could not write{where}: {(error.strerror or str(error)).lower()}"])


def _say(problems: Sequence[str]) -> int:
    """Prints problems. What rank 0 has said is left out by others, but not by the first rank of
    another host, whose log may be all that its user looks at, and not where a rank is named."""
    from pretrain.start import said_by_first

    rank, texts = os.environ.get("RANK", "0"), []
    said = said_by_first(rank, problems)
    first_of_host = os.environ.get("LOCAL_RANK", "0") == "0"
    for problem in problems:
        if rank == "0" or _NAMES_A_RANK.search(problem):
            texts.append(f"error: {problem}\n")
        elif first_of_host or problem not in said:
            texts.append(f"error: rank {rank} ({socket.gethostname()}): {problem}\n")
    sys.stderr.write(mask_text("".join(texts)))
    sys.stderr.flush()
    return 2


def _quiet() -> None:
    """One line a message; other packages' notices that their optional parts are absent: none."""
    log_to_stderr()
    for name in ("megatron", "torch", "torchao"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if not sys.warnoptions:
        warnings.filterwarnings("ignore", module=r"(megatron|torch|transformer_engine)\b")
        # megatron-core reads `.grad` of views; the mode below is named as the place.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not")


if __name__ == "__main__":  # saving a checkpoint spawns processes that import this module
    sys.exit(main(sys.argv[1:]))
