"""The cache of a draft net's keys and values; with a window it keeps only the first and the last
slots (SEAGLE).

Letters: B rows, R rows of this forward, K heads, S slots, N nodes, T nodes in slots, W width of this
forward (a number of slots), h head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eyas.core.cache import KVCache, LayerCache, slot_mask
from eyas.nn._layers import CacheContents, DraftSlots, rope

__all__ = ["DraftKVCache", "DraftLayerCache"]


class DraftLayerCache:
    """The cache of a draft net's layer, with slots and mask of the next forward. Compiled draft
    nets get this, like `LayerCache`.

    Args:
        rotated: keys after RoPE, and values.
        unrotated: keys before RoPE, if the draft has a window.
        length_R, visible_RNT: see `slot_mask`.
    """

    def __init__(
        self, rotated: LayerCache, unrotated: LayerCache | None, length_R: Tensor, visible_RNT: Tensor
    ) -> None:
        self.rotated, self.unrotated, self.width = rotated, unrotated, rotated.width
        self.length_R, self.visible_RNT = length_R, visible_RNT
        self.for_cpu: CacheContents | None = None  # kernels do not run compiled layers
        self.for_gpu: DraftSlots | None = None

    @property
    def mask_R1NW(self) -> Tensor:
        return slot_mask(self.length_R, self.visible_RNT, self.width)[:, None]

    def cpu_kernel_view(self) -> CacheContents | None:
        return self.for_cpu

    def gpu_kernel_view(self) -> DraftSlots | None:
        return self.for_gpu

    def store(
        self, key_RNKh: Tensor, value_RNKh: Tensor, position_RN: Tensor, frequency_h: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Store the new nodes' keys, not yet rotated, and values [R, N, K, h]. Returns the keys,
        rotated, and values of all slots below the width, [R, K, W, h]."""
        key_RKNh, value_RKNh = key_RNKh.transpose(1, 2), value_RNKh.transpose(1, 2)
        if self.unrotated is not None:
            self.unrotated.update(key_RKNh, value_RKNh[..., :0])
        return self.rotated.update(rope(key_RNKh, position_RN, frequency_h).transpose(1, 2), value_RKNh)


class DraftKVCache(KVCache):
    """The cache of a draft net. With a window it keeps the first `sink` and the last `size`
    committed slots of each row.

    For a window, keys are also stored before RoPE. `trim` removes the slots between sinks and
    window, and rotates the remaining keys by their new index in the cache (SEAGLE; attention sinks:
    Xiao et al. 2023, section 3.2). The cache is itself the `nn.DraftCache` of the net's first
    layer; `draft_layer` returns the others'.
    """

    def __init__(
        self,
        heads: int,
        head_size: int,
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
        window: tuple[int, int] | None,
        layers: int = 1,
    ) -> None:
        """`window`: (sink, size); None to keep all slots. `layers`: number of the net's layers,
        which have equal sizes."""
        keys_and_values = (heads, head_size, head_size)
        unrotated_keys = (heads, head_size, 0)  # stored as the keys of `layers` further layers
        super().__init__(
            (keys_and_values,) * layers + (() if window is None else (unrotated_keys,) * layers), rows, dtype, device
        )
        self.window, self.store_key, self.net_layers = window, (heads, head_size, device), layers
        self._length_R, self._visible_RNT = torch.zeros(1, dtype=torch.long), torch.zeros(1, 1, 1, dtype=torch.bool)

    def set_mask(self, length_R: Tensor, visible_RNT: Tensor) -> None:
        """Set the mask of the next forward: the committed slots, and of the T slots after them
        those that are visible."""
        self._length_R, self._visible_RNT = length_R, visible_RNT

    def draft_layer(self, number: int) -> DraftKVCache | DraftLayerCache:
        """Return the cache of one layer of the net for the next forward."""
        if not number:
            return self
        view = self.compiled_layer_view(number)
        view.for_cpu, view.for_gpu = self.cpu_kernel_view(number), self.gpu_kernel_view(number)
        return view

    def compiled_layer_view(self, number: int = 0) -> DraftLayerCache:
        """Return the cache of one layer for the next forward of a compiled net."""
        unrotated = None if self.window is None else self.layer_view(self.net_layers + number)
        return DraftLayerCache(self.layer_view(number), unrotated, self._length_R, self._visible_RNT)

    @property
    def mask_R1NW(self) -> Tensor:
        return slot_mask(self._length_R, self._visible_RNT, self.width)[:, None]

    def cpu_kernel_view(self, number: int = 0, layers: int = 1) -> CacheContents | None:
        """Return the tensors of one layer, or of several from it on, for kernels, which store keys and values
        themselves; None with a window, which they do not support."""
        if self.window is not None:
            return None
        store = self.tensor[2 * number : 2 * (number + layers)]
        return CacheContents(self._length_R, self._visible_RNT, store, self._rows)

    def gpu_kernel_view(self, number: int = 0) -> DraftSlots:
        """Return the tensors of one layer for the GPU kernels."""
        unrotated = None if self.window is None else self.keys_values(self.net_layers + number)[0]
        return DraftSlots(self._length_R, self._visible_RNT, *self.keys_values(number), unrotated)

    def store(
        self, key_RNKh: Tensor, value_RNKh: Tensor, position_RN: Tensor, frequency_h: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self.compiled_layer_view().store(key_RNKh, value_RNKh, position_RN, frequency_h)

    def trim(self, length_B: Tensor, frequency_h: Tensor) -> Tensor:
        """Remove the slots between the sinks and the window of each row; returns the new numbers of
        slots, int64 [B]."""
        assert self.window is not None
        sink, size = self.window
        slot_C = torch.arange(sink + size, device=self.device)
        self.reserve(sink + size)
        over_B1 = (length_B - (sink + size)).clamp(min=0)[:, None]
        source_BC = slot_C + over_B1 * (slot_C >= sink)
        row_B1, store = torch.arange(self.rows, device=self.device)[:, None], self._stores[self.store_key]
        for layer in range(self.net_layers):
            (key, value), (unrotated, _) = (
                [entry for _, entry in self._entries_of_layer[number]] for number in (layer, self.net_layers + layer)
            )
            for entry in (unrotated, value):
                store[entry, row_B1, :, slot_C] = store[entry, row_B1, :, source_BC]
            unrotated_BCKh = store[unrotated, row_B1, :, slot_C[None]]
            store[key, row_B1, :, slot_C] = rope(unrotated_BCKh, slot_C.expand(self.rows, -1), frequency_h)
        return length_B.clamp(max=sink + size)
