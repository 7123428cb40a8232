"""Recurrent and convolutional state of a target's layers (Mamba, gated delta nets, short
convolutions), for whole draft trees.

A state layer reads one token after another, each from the state that the token before left behind.
That state has no slots, so nothing of it can be masked or cut off when a drafted token is rejected.
So the nodes of a tree go through a state layer level by level: each node starts from the state of
its parent, and leaves one of its own.

    tree     0 --- 1 --- 3        step 0   node 0       from the committed state
                |--- 2            step 1   nodes 1, 2   both from the state of node 0, as two rows of one token
                                  step 2   node 3       from the state of node 1

When a path is accepted, the state of its last node is the row's committed state; those of the other
nodes are dropped. Nothing is read twice, rows accept different numbers of tokens without padding,
and every node is computed like a token of plain decoding: by the module's own forward, for one
token (`core.levels`). All other modules (attention, MLP, norms, lm_head) see the whole tree in one
pass, as they do in other models. A pass over a tree of depth d calls each state module d + 1 times.

The modules are the model's own (`core.state_modules`), and during a forward the states lie in
transformers' own cache layers. Prompts go through the modules in chunks, as in the model's
`generate`.

    mark     a copy of the state at some position of a row. A text can be read on from its end, or from a mark, and from nowhere else

Letters: B rows, R rows of a forward, T uncommitted nodes, Q new nodes among them, M nodes of one
level in all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from eyas.core.levels import Level, replaced_forward, run_levels, tree_levels
from eyas.core.state_modules import StateModule, States, load_states, stored_states

__all__ = ["RowStates"]

Forward = Callable[..., Any]

MARKS = 2  # copies of the state that each row keeps at most: a prompt's end among them


class RowStates:
    """The states of B rows: those after the committed tokens, those of the nodes behind them, and marks.

    Attributes:
        cache_layers: the layers of a `transformers` cache that the modules read; the caller puts
            them into the cache.

    The states of a module lie where the module computes; all that this class is given, on the main
    device.
    """

    def __init__(self, modules: Sequence[StateModule], rows: int, layers: int, device: torch.device) -> None:
        self.modules, self.rows, self.device = tuple(modules), rows, device
        self.cache_layers: list[Any] = [LinearAttentionLayer() for _ in range(layers)]
        for one in modules:
            self.cache_layers[one.layer] = LinearAttentionLayer(number_of_states=one.states_of_layer)
        self.committed: list[States] = [_tensors(one, (rows,), torch.zeros) for one in modules]
        self.nodes: list[States] = [{} for _ in modules]  # [B, T, ...]
        self.node_count = 0  # T
        self.continues = all(one.continues for one in modules)
        # of each row: position -> states, oldest first
        self.marks: list[dict[int, list[States]]] = [{} for _ in range(rows)]
        # of the last commit: lengths before it, path_BP, which rows
        self._path: tuple[Tensor, Tensor, Tensor] | None = None

    # --- forwards

    @contextmanager
    def prompt(self, row: int, fresh: bool) -> Iterator[None]:
        """Within this context, a forward of the model reads on from the committed state of one row,
        and replaces it.

        Args:
            fresh: the row is empty.
        """
        for one, states in zip(self.modules, self.committed, strict=True):
            self._load(one, None if fresh else {key: state[row : row + 1].clone() for key, state in states.items()})
        yield
        for one, states in zip(self.modules, self.committed, strict=True):
            for key, state in self._stored(one).items():
                states[key][row] = state[0]

    @contextmanager
    def tree(self, rows: Sequence[int], depth_RT: Tensor, visible_RQT: Tensor) -> Iterator[None]:
        """Within this context, a forward of the model reads Q new nodes of these rows; the
        committed states stay as they are."""
        R, Q, T = visible_RQT.shape
        levels, row_R = tree_levels(depth_RT, visible_RQT), torch.tensor(list(rows), device=self.device)
        self._grow(T, first=T == Q)
        everything = list(rows) == list(range(self.rows))
        on = {
            device: ([level.on(device) for level in levels], row_R.to(device))
            for device in {one.device for one in self.modules}
        }
        with ExitStack() as stack:
            for number, one in enumerate(self.modules):
                here, row_here_R = on[one.device]
                forward = self._level_by_level(
                    number, one.module.forward, here, None if everything else row_here_R, (R, Q), T - Q
                )
                stack.enter_context(replaced_forward(one.module, forward))
            yield

    def _level_by_level(
        self,
        number: int,
        forward: Forward,
        levels: Sequence[Level],
        row_R: Tensor | None,
        shape: tuple[int, int],
        earlier: int,
    ) -> Forward:
        """A forward that runs a state module's own, `forward`, once for each level.

        Args:
            row_R: the rows of the forward; None: all rows.
            earlier: number of nodes before the new ones.
        """
        one, committed, nodes = self.modules[number], self.committed[number], self.nodes[number]

        def load(level: Level) -> None:
            if level.follows:
                return  # the module has left the parents' states where it reads them
            row_M = level.row_M if row_R is None else row_R[level.row_M]
            if level.committed:
                self._load(one, {key: state[row_M] for key, state in committed.items()})
            else:
                self._load(one, {key: state[row_M, level.parent_M] for key, state in nodes.items()})

        def store(level: Level) -> None:
            for key, state in self._stored(one).items():
                if row_R is None and level.column is not None:
                    nodes[key][:, earlier + level.column] = state  # the same, faster
                else:
                    nodes[key][level.row_M if row_R is None else row_R[level.row_M], earlier + level.node_M] = state

        return lambda *args, **kwargs: run_levels(one, forward, levels, shape, (args, kwargs), load, store)

    def _grow(self, count: int, first: bool) -> None:
        """Make room for the states of that many nodes per row; those of earlier nodes stay unless
        these are the first."""
        for number, one in enumerate(self.modules):
            larger, old = _tensors(one, (self.rows, count), torch.empty), self.nodes[number]
            if not first:
                for key, state in larger.items():
                    state[:, : self.node_count] = old[key][:, : self.node_count]
            self.nodes[number] = larger
        self.node_count, self._path = count, None

    def _load(self, one: StateModule, states: States | None) -> None:
        load_states(self.cache_layers[one.layer], one.shapes, states)

    def _stored(self, one: StateModule) -> States:
        return stored_states(self.cache_layers[one.layer], one.shapes)

    # --- commits

    def commit(self, length_B: Tensor, path_BP: Tensor, count_B: Tensor, active_B: Tensor) -> None:
        """The state of the last node of each active row's path is its committed state now.

        Args:
            length_B: number of committed tokens before this.
            path_BP: int64; node numbers; -1 past the end.
            count_B: nodes on the path; 0: the row stays as it is.
        """
        row_R = (active_B & (count_B > 0)).nonzero()[:, 0]
        last_R = path_BP[row_R, count_B[row_R] - 1]
        for one, committed, nodes in zip(self.modules, self.committed, self.nodes, strict=True):
            here_R, node_R = row_R.to(one.device), last_R.to(one.device)
            for key, state in committed.items():
                state[here_R] = nodes[key][here_R, node_R]
        self._path = length_B.clone(), path_BP, torch.where(active_B, count_B, 0)

    # --- cutting, copying and emptying rows

    def mark(self, row: int, length: int) -> None:
        """Keep a copy of the row's committed state, which is that after `length` tokens."""
        marks = self.marks[row]
        marks.pop(length, None)
        marks[length] = [{key: state[row].clone() for key, state in states.items()} for states in self.committed]
        while len(marks) > MARKS:
            del marks[next(iter(marks))]

    def longest_known_prefix(self, row: int, length: int, most: int) -> int:
        """The largest number of tokens, up to `most`, after which the state is known; `length`:
        number of committed ones."""
        if most >= length:
            return length
        known = {0, *self.marks[row], *self._path_lengths(row)}
        return max((n for n in known if n <= most), default=0)

    def _path_lengths(self, row: int) -> range:
        """The lengths within the last commit at which the row can be cut."""
        if self._path is None:
            return range(0)
        length_B, _, count_B = self._path
        before = int(length_B[row])
        return range(before + 1, before + 1 + int(count_B[row]))

    def truncate(self, row: int, length: int, committed: int) -> None:
        """Cut a row of `committed` tokens back to `length`, at which its state is known (`TargetSession.longest_known_prefix`)."""
        if length != committed and length:
            self._put(row, self._at(row, length))
        self._forget(row, length)

    def copy(self, source: int, row: int, length: int, committed: int) -> None:
        """Replace a row's state by that of another row of `committed` tokens after its first `length`."""
        if length:
            self._put(row, self._at(source, length) if length != committed else self._row(self.committed, source))
        if source != row:
            self.marks[row] = {at: states for at, states in self.marks[source].items() if at <= length}
        self._forget(row, length)

    def clear(self, row: int) -> None:
        """Empty a row whose states may be NaN."""
        self.marks[row] = {}
        for states in self.committed:
            for state in states.values():
                state[row] = 0
        self._forget(row, 0)

    def _at(self, row: int, length: int) -> list[States]:
        """The states of the row after its first `length` tokens."""
        if length in self.marks[row]:
            return self.marks[row][length]
        assert self._path is not None, "no state is known at this length"
        length_B, path_BP, _ = self._path
        node = int(path_BP[row, length - 1 - int(length_B[row])])
        return [{key: state[row, node] for key, state in states.items()} for states in self.nodes]

    def _row(self, states: Sequence[States], row: int) -> list[States]:
        return [{key: state[row] for key, state in one.items()} for one in states]

    def _put(self, row: int, states: Sequence[States]) -> None:
        for committed, new in zip(self.committed, states, strict=True):
            for key, state in committed.items():
                state[row] = new[key]

    def _forget(self, row: int, length: int) -> None:
        """Drop what is known about the row's text behind its first `length` tokens."""
        self.marks[row] = {at: states for at, states in self.marks[row].items() if at <= length}
        if self._path is not None:
            self._path[2][row] = 0
        if length == 0:
            for states in self.committed:
                for state in states.values():
                    state[row] = 0

    @property
    def bytes(self) -> int:
        """Bytes of the states of all rows, without those of nodes and marks."""
        return sum(state.nbytes for states in self.committed for state in states.values())


def _tensors(one: StateModule, sizes: tuple[int, ...], make: Callable[..., Tensor]) -> States:
    return {key: make(*sizes, *shape, dtype=dtype, device=one.device) for key, (shape, dtype) in one.shapes.items()}
