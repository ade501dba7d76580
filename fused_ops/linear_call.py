# SPDX-License-Identifier: Apache-2.0
"""What a call of a linear layer is given besides its tensors.

Operand names are "fprop.x", "fprop.w", "dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x".
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from fused_ops.formats import Operand, OperandSpec, QuantizedTensor
from fused_ops.keys import StreamKey
from fused_ops.quantize import DelayedScaling
from fused_ops.recipe import GemmRecipe
from fused_ops.weight_codes import WeightCodes

Run = tuple[int, int]
"""How many consecutive rows or columns, and the global number of the first."""


@dataclass(frozen=True)
class Runs:
    """Where the rows and columns of a local tensor lie in the global one, if not in one piece.

    The lengths of each add up to the tensor's. A run that others follow must be a multiple of the
    blocks and rotations along its axis, so that none of them crosses its end.
    """

    rows: tuple[Run, ...]
    columns: tuple[Run, ...]

    def of_shape(self, rows: int, columns: int) -> "Runs":
        """A single run is as long as the tensor: experts have their own numbers of rows."""
        row, column = self.rows, self.columns
        return Runs(
            rows=row if len(row) > 1 else ((rows, row[0][1]),),
            columns=column if len(column) > 1 else ((columns, column[0][1]),),
        )


Origin = tuple[int, int] | Runs


class Comm(Protocol):
    """What a linear layer asks of the ranks it is cut over. One process: `LocalComm`."""

    def gather_input(self, x: Tensor) -> Tensor:
        """The input of the GEMM from this rank's part of it (sequence parallel: all tokens)."""
        ...

    def reduce_input_grad(self, dx: Tensor) -> tuple[Tensor, Any]:
        """The gradient for this rank's part of the input, and a handle to `wait()` on or None."""
        ...

    def scatter_output(self, y: Tensor) -> Tensor:
        """This rank's part of the sum of all ranks' outputs, or y itself where others do that."""
        ...

    def gather_output_grad(self, dy: Tensor) -> Tensor:
        """The gradient of this rank's summand from that of its part of the sum, or dy itself."""
        ...

    def part(self, names: tuple[str, ...]) -> "Part | None":
        """The part of X or dY here, if these operands of it are to move as codes."""
        ...

    def reduce_amax(self, name: str, amax: Tensor) -> Tensor:
        """The maximum of `amax`, left as it is, over the ranks that hold parts of operand `name`.

        Called in the same order on all of them, once per quantization; a weight's once per rebuild
        of its codes. Row-scaled operands have one amax a row, stacks of experts one an expert.
        """
        ...

    def reduce_amaxes(self, names: Sequence[str], amaxes: Sequence[Tensor]) -> list[Tensor]:
        """`reduce_amax` of several operands at once."""
        ...

    def origin(self, name: str) -> Origin:
        """Global (row, column) of element [0, 0] of the local tensor behind the operand `name`.

        In the tensor's own layout: x is [tokens, in], w [out, in], dy [tokens, out]. `Runs` if it
        is put together from several pieces of the global tensor: a zigzag cut of the sequence, or
        output features that are cut part by part (gate and up).
        """
        ...


class Part(Comm, Protocol):
    """This rank's part of the tokens of X or dY, whose codes move instead of the tensor.

    Amaxes and origins are those that make a part's codes the codes of the whole.
    """

    def gather(self, name: str, operand: QuantizedTensor) -> Callable[[], QuantizedTensor]:
        """Begins to gather the codes of all ranks' parts; call the result for the operand.

        It has the codes and scales that quantizing the gathered tensor would give.
        """
        ...


class LocalComm:
    """One process: nothing to gather, nothing to reduce."""

    def gather_input(self, x: Tensor) -> Tensor:
        """x itself."""
        return x

    def reduce_input_grad(self, dx: Tensor) -> tuple[Tensor, Any]:
        """dx itself, ready."""
        return dx, None

    def scatter_output(self, y: Tensor) -> Tensor:
        """y itself."""
        return y

    def gather_output_grad(self, dy: Tensor) -> Tensor:
        """dy itself."""
        return dy

    def part(self, names: tuple[str, ...]) -> None:
        """Nothing moves."""
        return

    def reduce_amax(self, name: str, amax: Tensor) -> Tensor:
        """amax itself."""
        return amax

    def reduce_amaxes(self, names: Sequence[str], amaxes: Sequence[Tensor]) -> list[Tensor]:
        """Each as `reduce_amax` gives it."""
        return [self.reduce_amax(name, amax) for name, amax in zip(names, amaxes)]

    def origin(self, name: str) -> Origin:
        """The whole tensor is here."""
        return 0, 0


class Observer(Protocol):
    """Sees each operand of each GEMM; must not synchronise with the device."""

    def observe(
        self, gemm: str, operand: str, tensor: Tensor, quantized: Operand, call: "LinearCall"
    ) -> None:
        """Called when the operand is ready; that of wgrad's x is made in the forward.

        Args:
            gemm: "fprop", "dgrad" or "wgrad".
            operand: "x", "w" or "dy".
            tensor: the high-precision tensor in its own layout (not transposed).
            quantized: what is multiplied: codes, or the tensor or its transpose.
            call: the call of the layer that it belongs to; of experts, of this expert.
        """
        ...


@dataclass(kw_only=True)
class LinearCall:
    """How one call of a linear layer computes."""

    recipe: GemmRecipe
    key: StreamKey = field(default_factory=StreamKey)
    comm: Comm = field(default_factory=LocalComm)
    weight_codes: WeightCodes | None = None
    """Where the codes of the weight are kept across calls; None: built anew in each use."""
    weights_epoch: int = 0
    """Raised by whoever changes weights in a way that no version counter shows."""
    main_grad: bool = False
    """The weight gradient is added to `weight.main_grad` (fp32) instead of being returned."""
    observer: Observer | None = None
    nonfinite: Tensor | None = None
    """A flag on the device, raised when a tensor that is to be quantized holds Inf or NaN."""
    check_finite: bool = False
    """Raise FloatingPointError at once instead; waits for the device in every operand."""
    name: str = ""
    """The layer, for messages."""
    delayed: dict[str, DelayedScaling] | None = None
    """The state of each fp8_delayed operand, by "fprop.x.EXPERT": the layer's own, filled here."""
    note_amax: bool = True
    """Whether fp8_delayed operands leave their amax in that state: not in an evaluation."""
    row_block: int | None = None
    """The forward GEMM in blocks of so many rows: see `fused_ops.scaled_matmul.scaled_matmul`."""
    implementation: str | None = None
    """Forces one implementation of quantization and matmul; None: the first that can."""

    def spec(self, name: str) -> OperandSpec:
        """The spec of the operand called `name`."""
        return self.recipe.spec(*name.split("."))
