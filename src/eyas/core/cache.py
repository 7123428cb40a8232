"""Preallocated KV caches in which each row has its own length.

The slots of a row hold its committed tokens first, then the nodes that are being verified (or
drafted). A committed token in slot s has position s; a node at depth d has position length + d in any slot.

    slot      0 1 2 3 4 | 5 6 7 8 9
    row 0     c c c c c | n n n n n        5 committed, 5 nodes
    row 1     c c c n n   n n n            3 committed, nodes right after them

`KVCache` is passed to Hugging Face models as `past_key_values`: `prepare` sets where the next forward writes,
and the model calls `update` once for each layer. `commit` moves the accepted nodes to the slots after the
committed ones. Sliding windows of a target are a matter of masks, not of slots. The cache of a draft net is
`nn.DraftKVCache`. Letters: B rows, R rows of this forward, H (or K) heads, S slots, N nodes, T nodes in slots,
P path, W width of this forward (a number of slots), h head size, E layers x {key, value}.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from eyas.errors import ModelError

__all__ = [
    "KVCache", "LayerCache", "Layout", "additive_mask", "commit_path", "common_prefix", "from_int8", "layout_of",
    "slot_mask", "slot_positions",
]  # fmt: skip

# per layer: (heads, head size of keys, head size of values); None = the layer stores nothing of its
# own
Layout = tuple[tuple[int, int, int] | None, ...]
# which store holds a layer's keys or values: heads, head size, and the device that they are on
StoreKey = tuple[int, int, torch.device]

Commit = Callable[[Tensor, Tensor, Tensor], None]  # the signature of `commit_path`
BUCKET = 256  # slots are allocated in multiples of this
MMAP_FROM_BYTES = 2**20  # tensors of this size and larger use anonymous mmap on a CPU, see `_zeros`
# on a GPU the width of a forward is a multiple of this: attention kernels want aligned masks, and
# fewer shapes occur
ALIGNED = 64


def layout_of(cache: Cache) -> Layout:
    """Return the layout of a growing cache that a forward of the model has filled."""
    stored = ((getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in cache.layers)
    return tuple(None if k is None or v is None else (k.shape[1], k.shape[-1], v.shape[-1]) for k, v in stored)


class LayerCache:
    """The keys and values of one layer, and the slots of the next forward.

    Compiled layers get this in place of the whole cache: it does not depend on the layer's index,
    so all layers share one compilation.
    """

    def __init__(
        self, key_RHSh: Tensor, value_RHSh: Tensor, row_R1: Tensor, slot_RN: Tensor, width: int, gathers_rows: bool = False,
    ) -> None:  # fmt: skip
        self.key_RHSh, self.value_RHSh, self.row_R1 = key_RHSh, value_RHSh, row_R1
        self.slot_RN, self.width = slot_RN, width
        self.gathers_rows = gathers_rows  # the tensors also hold rows that are not in the forward

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """See `KVCache.update`."""
        for store, states in ((self.key_RHSh, key_states), (self.value_RHSh, value_states)):
            store[self.row_R1, :, self.slot_RN] = _as_stored(states, store.dtype).transpose(1, 2)
        row_R = self.row_R1[:, 0] if self.gathers_rows else slice(None)
        return self.key_RHSh[row_R, :, : self.width], self.value_RHSh[row_R, :, : self.width]


def _as_stored(states: Tensor, dtype: torch.dtype) -> Tensor:
    """Return keys or values in the cache's dtype, if that holds them exactly. A forward under its own autocast,
    as accelerate's mixed precision makes it, has narrower ones than its weights."""
    if states.dtype != dtype and torch.promote_types(states.dtype, dtype) != dtype:
        raise ModelError(
            f"a layer's keys and values are {states.dtype}, but the model is {dtype}: load it in one dtype"
        )
    return states.to(dtype)


class KVCache(Cache):
    """Keys and values of B rows in one tensor [E, B, H, S, h]; one for each (heads, head size,
    device), if layers differ. In int8, which kernels write, a slot has 4 bytes more.

    Args:
        layout: the sizes of each layer.
        device: of lengths, paths and slots.
        commit: the implementation of `commit_path`: torch or compiled kernels.
        devices: of the layers' keys and values; (): all are on `device`.
    """

    def __init__(
        self, layout: Layout, rows: int, dtype: torch.dtype, device: torch.device, commit: Commit | None = None,
        devices: Sequence[torch.device | None] = (),
    ) -> None:  # fmt: skip
        super().__init__(layer_class_to_replicate=DynamicLayer)
        self.rows, self.dtype, self.device, self._commit = rows, dtype, device, commit or commit_path
        self.slots, self._extra = 0, 4 if dtype == torch.int8 else 0  # the float32 that multiplies a slot's numbers
        # layer -> for its keys, then its values: (store, index in the first dimension of that
        # store)
        self._entries_of_layer: dict[int, tuple[tuple[StoreKey, int], ...]] = {}
        self._entries_of_store: dict[StoreKey, int] = {}  # store -> size of that first dimension
        for layer, sizes in enumerate(layout):
            if sizes is not None:
                heads, *head_sizes = sizes
                place = (devices[layer] if devices else None) or device
                self._entries_of_layer[layer] = tuple(
                    ((heads, h, place), self._next((heads, h, place))) for h in head_sizes
                )
        self._stores: dict[StoreKey, Tensor] = {}
        self._make_slots: Callable[[], Tensor] = lambda: torch.zeros(1, 1, dtype=torch.long)
        # rows [R, 1] and slots [R, N] of the next forward
        self._indices_by_device: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._rows: Sequence[int] = range(0)
        self._width = 0

    def _next(self, shape: StoreKey) -> int:
        self._entries_of_store[shape] = self._entries_of_store.get(shape, 0) + 1
        return self._entries_of_store[shape] - 1

    def reserve(self, slots: int) -> None:
        """Grow to at least `slots` slots per row; the contents stay."""
        if slots <= self.slots:
            return
        size = -(-slots // BUCKET) * BUCKET
        for (heads, h, device), entries in self._entries_of_store.items():
            store = _zeros((entries, self.rows, heads, size, h + self._extra), self.dtype, device)
            if (old := self._stores.get((heads, h, device))) is not None:
                store[..., : self.slots, :] = old
            self._stores[heads, h, device] = store
        self.slots = size

    def clear(self, row: int) -> None:
        """Set everything that the row holds to zero: NaN would spread from slots that a mask hides,
        as 0 x NaN is NaN."""
        for store in self._stores.values():
            store[:, row] = 0

    def prepare(self, rows: Sequence[int], slot_RN: Callable[[], Tensor], width: int) -> None:
        """Set rows and slots of the next forward.

        Args:
            rows: a range, or an ascending list if rows between them are left out.
            slot_RN: returns int64 [R, N], the slot for each new node. It is called only if torch
                stores the nodes; kernels compute the slots themselves.
            width: the forward attends to slots below this; `align_width` may round it up.
        """
        width = self.align_width(width)
        self.reserve(width)
        self._rows, self._make_slots, self._indices_by_device, self._width = rows, slot_RN, {}, width

    def align_width(self, width: int) -> int:
        """Return the width of a forward that attends to slots below `width`: on a GPU the next multiple of
        ALIGNED."""
        return -(-width // ALIGNED) * ALIGNED if self.device.type == "cuda" else width

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store keys and values [R, H, N, h]; return the keys and values of all slots below the forward's width.
        Called by attention layers."""
        return self.layer_view(layer_idx).update(key_states, value_states)

    def layer_view(self, layer: int) -> LayerCache:
        """Return the cache of one layer for the next forward."""
        (_, _, device), _ = self._entries_of_layer[layer][0]
        return LayerCache(
            *self.keys_values(layer), *self._rows_and_slots(device), self._width, not isinstance(self._rows, range)
        )

    def _rows_and_slots(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the rows [R, 1] and slots [R, N] of the next forward, on this device."""
        if not self._indices_by_device:
            slot_RN, rows = self._make_slots(), self._rows
            row_R = (
                torch.arange(len(rows), device=self.device)
                if isinstance(rows, range)
                else torch.tensor(rows, device=self.device)
            )
            self._indices_by_device[self.device] = row_R[:, None], slot_RN
        if device not in self._indices_by_device:
            row_R1, slot_RN = self._indices_by_device[self.device]
            self._indices_by_device[device] = row_R1.to(device), slot_RN.to(device)
        return self._indices_by_device[device]

    def keys_values(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values [R, H, S, h] of one layer, for the rows of the next forward; for all rows if
        those are not a range."""
        span = slice(self._rows.start, self._rows.stop) if isinstance(self._rows, range) else slice(None)
        key, value = (self._stores[shape][entry, span] for shape, entry in self._entries_of_layer[layer])
        return key, value

    def read_committed(self, layer: int, width: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values [B, H, W, h] of one layer in all rows: the first W = `width` slots, or all if
        there are fewer. Those in int8 become float32."""
        key, value = (self._stores[shape][entry, :, :, :width] for shape, entry in self._entries_of_layer[layer])
        return (key, value) if self.dtype != torch.int8 else (from_int8(key), from_int8(value))

    def stores_of(self, layer: int) -> bool:
        """Return whether the layer has keys and values of its own."""
        return layer in self._entries_of_layer

    def commit(self, length_B: Tensor, path_BP: Tensor) -> None:
        """Move the nodes of each row's path (-1 past its end) to the slots after its committed ones."""
        if path_BP.shape[1] == 1:
            return
        for (_, _, device), store in self._stores.items():
            self._commit(store, length_B.to(device), path_BP.to(device))

    def copy(self, source: int, row: int, slots: int) -> None:
        """Copy the first slots of one row to another."""
        for store in self._stores.values():
            store[:, row, :, :slots] = store[:, source, :, :slots]

    @property
    def addresses(self) -> tuple[int, ...]:
        """The size and the data pointers of the tensors: they change when the cache grows."""
        return self.slots, *(store.data_ptr() for store in self._stores.values())

    @property
    def stores(self) -> tuple[Tensor, ...]:
        """The tensors [E, B, H, S, h], one for each (heads, head size, device)."""
        return tuple(self._stores.values())

    @property
    def width(self) -> int:
        """The next forward attends to slots below this."""
        return self._width

    @property
    def tensor(self) -> Tensor:
        """The only tensor [E, B, H, S, h] of a model whose layers have equal sizes."""
        (only,) = self._stores.values()
        return only

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0, for the library's interface of caches."""
        return 0  # the model gets positions and masks explicitly, and must not derive them from a length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return (keys and values of the pass, offset), for the library's interface of caches."""
        return self._width, 0

    @property
    def is_sliding(self) -> list[bool]:
        """False for each layer, for the library's interface of caches: entries are never dropped here."""
        return [False] * (max(self._entries_of_layer, default=-1) + 1)

    def __len__(self) -> int:
        return max(self._entries_of_layer, default=-1) + 1

    def bytes_for(self, slots: int) -> int:
        """Return the bytes that this number of slots per row takes, on all devices together."""
        return sum(self.bytes_by_device(slots).values())

    def bytes_by_device(self, slots: int) -> dict[torch.device, int]:
        """Return the bytes that this number of slots per row takes on each device."""
        total: dict[torch.device, int] = {}
        for (heads, h, device), n in self._entries_of_store.items():
            total[device] = (
                total.get(device, 0) + n * self.rows * heads * (h + self._extra) * slots * self.dtype.itemsize
            )
        return total


def from_int8(store: Tensor) -> Tensor:
    """Return slots [..., h + 4] of a cache in int8 as float32 [..., h]."""
    return store[..., :-4].float() * store[..., -4:].contiguous().view(torch.float32)


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros. A large tensor on a CPU uses anonymous mmap, whose pages the system allocates on first write.

    `torch.zeros` writes all of them at once: room for 8,000 tokens in sixteen rows would stall
    every request for seconds.
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < MMAP_FROM_BYTES:
        return torch.zeros(*shape, dtype=dtype, device=device)
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}  # not on Windows
    return torch.frombuffer(mmap.mmap(-1, size, **private), dtype=dtype).view(*shape)


def commit_path(store: Tensor, length_B: Tensor, path_BP: Tensor) -> None:
    """Move the nodes of each row's path (-1 past its end) in [E, B, H, S, h] to the slots after its committed ones.

    The root is there already: it is node 0, and so in the first slot after the committed ones.
    """
    row_B1 = torch.arange(store.shape[1], device=store.device)[:, None]
    goal_BP = length_B[:, None] + torch.arange(1, path_BP.shape[1], device=store.device)
    source_BP = torch.where(path_BP[:, 1:] >= 0, length_B[:, None] + path_BP[:, 1:], goal_BP)
    store[:, row_B1, :, goal_BP] = store[:, row_B1, :, source_BP]


def slot_mask(length_B: Tensor, visible_BNT: Tensor, width: int) -> Tensor:
    """Return the mask, bool [B, N, W], by which each node attends to the committed slots of its row and to the
    visible ones of the T slots after them."""
    relative_BW = torch.arange(width, device=length_B.device) - length_B[:, None]
    T = visible_BNT.shape[-1]
    index_BNW = relative_BW.clamp(0, T - 1)[:, None].expand(-1, visible_BNT.shape[1], -1)
    inside_BW = (relative_BW >= 0) & (relative_BW < T)
    return (relative_BW < 0)[:, None] | (inside_BW[:, None] & visible_BNT.gather(-1, index_BNW))


def additive_mask(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask in which a model attends where `allowed` is True: 0 there, elsewhere the lowest
    number of the dtype."""
    mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return mask.masked_fill_(~allowed, torch.finfo(dtype).min)


def slot_positions(length_B: Tensor, depth_BT: Tensor, width: int) -> Tensor:
    """Return the position of each slot's token, int64 [B, W]."""
    slot_W = torch.arange(width, device=length_B.device)
    relative_BW = (slot_W - length_B[:, None]).clamp(0, depth_BT.shape[1] - 1)
    return torch.where(slot_W < length_B[:, None], slot_W, length_B[:, None] + depth_BT.gather(1, relative_BW))


def common_prefix(a: Sequence[object], b: Sequence[object]) -> int:
    """Return the length of the longest common prefix of two sequences of tokens, or of two texts."""
    same, shorter = 0, min(len(a), len(b))
    while same < shorter:  # blocks are compared at once, which is faster than token by token
        block = slice(same, min(same + 64, shorter))
        if list(a[block]) == list(b[block]):
            same = block.stop
        elif a[same] == b[same]:
            same += 1
        else:
            break
    return same
