# SPDX-License-Identifier: Apache-2.0
"""Settings of the monitor of numerics."""

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass


@dataclass(kw_only=True, frozen=True, config=ConfigDict(extra="forbid"))
class MonitorConfig:
    """How often and how closely the numerics of GEMMs are looked at."""

    interval: int = Field(default=0, ge=0)
    """Steps between two monitored ones, which look at a rank's micro-batches in turn; 0: never."""
    rows: int = Field(default=128, ge=0)
    """Rows of an operand that are looked at, in whole blocks spread over it; 0: all."""
    columns: int = Field(default=4096, ge=0)
    """The same along the contraction of the GEMM; 0: all."""
    experts: int = Field(default=8, ge=1)
    """Experts of a layer that are looked at."""
