"""The recurrent and convolutional state of rows whose forwards the CPU kernels run.

`targets/recurrent.py` holds a state for each node of a tree, as the model's own modules leave them. The kernels hold the
state after a row's committed tokens, and small records of the uncommitted nodes (kernels/cpu/states.h). A commit notes
the accepted path; the row's next pass adds it to the state. Until then the row can be cut anywhere on that path.

Letters: B rows, L layers with states, S numbers of a state, T nodes, X numbers of a node's record, P path.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from eyas.core.extensions import TargetState
from eyas.core.target import ForwardInput
from eyas.kernels import StateLayer, States, floats
from eyas.targets.recurrent import MARKS

__all__ = ["KernelStates"]


class KernelStates(TargetState):
    """The states of B rows: after the committed tokens, of the uncommitted nodes, and at marks."""

    def __init__(self, layers: list[StateLayer], rows: int) -> None:
        self.rows, self.layers = rows, len(layers)
        self.record_size = max(layer.node_size for layer in layers)
        self.state_BLS = floats(rows, len(layers), max(layer.state_size for layer in layers)).zero_()
        self.node_BLTX = self._nodes(1)
        self.path_BP = torch.zeros(rows, 1, dtype=torch.long, device="cpu")
        self.pending_B = torch.zeros(rows, dtype=torch.long, device="cpu")
        # marks of each row: length -> state, oldest first
        self.marks: list[dict[int, Tensor]] = [{} for _ in range(rows)]

    def _nodes(self, count: int) -> Tensor:
        return floats(self.rows, self.layers, count, self.record_size)

    @contextmanager
    def reading(self, inputs: ForwardInput, length_B: Tensor, fresh: bool) -> Iterator[None]:
        if inputs.prompt and fresh:
            self.clear(inputs.rows[0])
        known, needed = self.node_BLTX.shape[2], inputs.depth_RT.shape[1]
        if needed > known and not inputs.prompt:
            larger = self._nodes(needed)
            larger[:, :, :known] = self.node_BLTX
            self.node_BLTX = larger
        yield

    @property
    def record(self) -> States:
        return States(self.state_BLS, self.node_BLTX, self.path_BP, self.pending_B)

    # --- commits

    def commit(self, length_B: Tensor, path_BP: Tensor, count_B: Tensor, active_B: Tensor) -> None:
        commits_B = active_B & (count_B > 0)
        missing = path_BP.shape[1] - self.path_BP.shape[1]
        if missing > 0:
            self.path_BP = torch.nn.functional.pad(self.path_BP, (0, missing))
        part_BP = self.path_BP[:, : path_BP.shape[1]]
        part_BP.copy_(torch.where(commits_B[:, None], path_BP, part_BP))
        self.pending_B.copy_(torch.where(commits_B, count_B, self.pending_B))

    def advance(self, length_B: Tensor, count_B: Tensor) -> None:
        chain_BP = torch.arange(self.node_BLTX.shape[2], device="cpu").expand(self.rows, -1)
        self.commit(length_B, chain_BP, count_B, count_B > 0)

    # --- cutting, copying and emptying rows

    def prompt_read(self, row: int, length: int) -> None:
        marks = self.marks[row]
        marks.pop(length, None)
        marks[length] = self.state_BLS[row].clone()  # after a prompt's chunk nothing is pending
        while len(marks) > MARKS:
            del marks[next(iter(marks))]

    def longest_known_prefix(self, row: int, length_B: Tensor, max_length: int) -> int:
        length = min(max_length, int(length_B[row]))
        if length >= self._stored(row, length_B):
            return length
        return max((known for known in {0, *self.marks[row]} if known <= length), default=0)

    def _stored(self, row: int, length_B: Tensor) -> int:
        """Return after how many of the row's tokens its stored state is."""
        return int(length_B[row]) - int(self.pending_B[row])

    def truncate(self, row: int, length: int, length_B: Tensor) -> None:
        self.copy(row, row, length, length_B)

    def copy(self, source: int, row: int, length: int, length_B: Tensor) -> None:
        pending = length - self._stored(source, length_B)
        if length == 0:
            self.state_BLS[row] = 0
        elif pending < 0:
            self.state_BLS[row] = self.marks[source][length]
        elif source != row:
            for tensor in (self.state_BLS, self.path_BP, *([self.node_BLTX] if pending else ())):
                tensor[row] = tensor[source]
        self.pending_B[row] = max(pending, 0) if length else 0
        self.marks[row] = {at: state for at, state in self.marks[source].items() if at <= length}

    def clear(self, row: int) -> None:
        """Empty a row whose state may be NaN."""
        self.marks[row] = {}
        self.state_BLS[row] = 0
        self.pending_B[row] = 0
