# SPDX-License-Identifier: Apache-2.0
"""The quantized forms of one weight, kept while the weight does not change.

They are built at their first use, so at the first micro-batch after an optimizer step, when an
overlapped parameter gather has finished. They are no part of any state dict.

What counts as the same weight: the version counter (in-place edits, optimizers,
`load_state_dict`), the storage and address in it (casts, moves), dtype, device, and the weights
epoch of the caller. The epoch is for writes that no counter shows: through `weight.data`, or into
the flat buffer behind a parameter, as a distributed optimizer's all-gather does.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

if TYPE_CHECKING:
    from fused_ops.formats import DecodedTensor, QuantizedTensor


@dataclass
class _Entry:
    identity: tuple[Hashable, ...]
    # A live weak reference keeps the storage's address from being used again.
    storage: StorageWeakRef
    codes: "QuantizedTensor | DecodedTensor"
    given: bool = False


def _identity(
    weight: Tensor, weights_epoch: int, variant: tuple[Hashable, ...]
) -> tuple[tuple[Hashable, ...], StorageWeakRef]:
    """What codes of this weight are kept under, and the reference that keeps it meaningful."""
    storage = StorageWeakRef(weight.untyped_storage())
    identity = (
        weight._version,
        weight.data_ptr(),
        weight.dtype,
        weight.device,
        tuple(weight.shape),
        weight.stride(),
        storage.cdata,
        weights_epoch,
        variant,
    )
    return identity, storage


class WeightCodes:
    """The codes of one weight, or of a stack of experts' weights, by operand name."""

    def __init__(self) -> None:
        self._entries: dict[Hashable, _Entry] = {}

    def get(
        self,
        name: Hashable,
        weight: Tensor,
        weights_epoch: int,
        variant: tuple[Hashable, ...],
        build: Callable[[], "QuantizedTensor | DecodedTensor"],
    ) -> "QuantizedTensor | DecodedTensor":
        """The codes called `name` of `weight`, built if there are none or the weight has changed.

        Args:
            variant: whatever else the codes depend on: spec, signs, dither.
            build: makes them.

        Raises:
            RuntimeError: the codes were given (`give`), and the weight or its precision is another
                one now: codes made of it would not be those that were given.
        """
        identity, storage = _identity(weight, weights_epoch, variant)
        entry = self._entries.get(name)
        if entry is None or entry.identity != identity:
            if entry is not None and entry.given:
                raise RuntimeError(
                    f"the codes {name} were handed over, and their weight or its precision has "
                    "changed since; take them over again, or call release() first"
                )
            entry = _Entry(identity, storage, build())
            self._entries[name] = entry
        return entry.codes

    def give(
        self,
        name: Hashable,
        weight: Tensor,
        weights_epoch: int,
        variant: tuple[Hashable, ...],
        codes: "QuantizedTensor",
    ) -> None:
        """Keeps codes that someone else made of the weight; `drop` leaves them."""
        identity, storage = _identity(weight, weights_epoch, variant)
        self._entries[name] = _Entry(identity, storage, codes, given=True)

    @property
    def has_given(self) -> bool:
        """Whether codes are kept that someone else made."""
        return any(entry.given for entry in self._entries.values())

    def drop(self) -> None:
        """Forgets what was built here: for loads, casts, moves and changes of the weight."""
        self._entries = {name: entry for name, entry in self._entries.items() if entry.given}

    def release(self) -> None:
        """Forgets everything, codes that were given too."""
        self._entries = {}

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return sum(entry.codes.nbytes for entry in self._entries.values())

    def __deepcopy__(self, memo: dict[int, Any]) -> "WeightCodes":
        """A copied module has a weight of its own: it starts without codes."""
        return WeightCodes()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return WeightCodes, ()
