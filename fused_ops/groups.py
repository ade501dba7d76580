# SPDX-License-Identifier: Apache-2.0
"""Groups of rows, such as the tokens of each expert: where they lie, for kernels that take all.

Built from counts that the host knows, and copied to the device without waiting for it. Two layouts:
rows as they are, one group after the other; and columns, a matrix [features, tokens] whose groups
begin at multiples of 16 (`blocks`), since blocks and rotations along the tokens end with a group.
"""

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

HEIGHTS = (64, 128, 256)
"""Rows of the tiles that kernels take; a tile belongs to one group."""
PLACE = 8
"""Words of a group in `place`: first row, rows, first block, first tile of each height, 0, 0."""
_KEPT = 64


class Groups:
    """Rows sorted by group.

    Attributes:
        counts: rows of each group; 0 is fine.
        rows: of all groups.
        blocks: of 16 columns, of all groups in the column layout.
        place: int32 [groups, 8] on the device, see PLACE.
        ends: int32 [groups] on the device: the row behind each group.
    """

    def __init__(self, counts: Sequence[int], device: torch.device) -> None:
        self.counts, self.device = tuple(counts), device
        sizes = torch.tensor(self.counts, dtype=torch.int64, device="cpu")
        blocks = -(-sizes // 16)
        tiles = [-(-sizes // height) for height in HEIGHTS]
        columns = [_before(sizes), sizes, _before(blocks), *map(_before, tiles)]
        place = torch.zeros((len(sizes), PLACE), dtype=torch.int64, device="cpu")
        place[:, : len(columns)] = torch.stack(columns, 1)
        self.rows, self.blocks = sum(self.counts), int(blocks.sum())
        self.tile_counts = {h: int(t.sum()) for h, t in zip(HEIGHTS, tiles)}
        numbers = torch.arange(len(sizes), device="cpu")
        tables = [place, sizes.cumsum(0)] + [numbers.repeat_interleave(t) for t in tiles]
        self.place, self.ends, *parts = to_device(tables, device)
        self._tiles = dict(zip(HEIGHTS, parts))

    def __len__(self) -> int:
        return len(self.counts)

    def tiles(self, height: int) -> Tensor:
        """int32 [tiles]: the group of each tile of `height` rows."""
        return self._tiles[height]


def _before(sizes: Tensor) -> Tensor:
    """The sum of all earlier sizes."""
    return sizes.cumsum(0) - sizes


def to_device(tables: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """int32 tables on the device, from one copy that is not waited for; words keep their bits.

    Each begins at a multiple of 16 bytes.
    """
    starts, total = [], 0
    for table in tables:
        starts.append(total)
        total += -(-table.numel() // 4) * 4
    host = torch.empty(
        max(total, 1), dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda"
    )
    for start, table in zip(starts, tables):
        host[start : start + table.numel()] = table.reshape(-1)
    whole = host.to(device, non_blocking=True)
    return [whole[s : s + t.numel()].view(t.shape) for s, t in zip(starts, tables)]


_GROUPS: "OrderedDict[tuple[tuple[int, ...], torch.device, int], Groups]" = OrderedDict()


def groups_of(counts: Sequence[int], device: torch.device) -> Groups:
    """The groups with these counts: built once while they are in use, in any layer and pass."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    key = (tuple(counts), device, stream)
    found = _GROUPS.get(key)
    if found is None:
        found = _GROUPS[key] = Groups(counts, device)
        if len(_GROUPS) > _KEPT:
            _GROUPS.popitem(last=False)
    else:
        _GROUPS.move_to_end(key)
    return found
