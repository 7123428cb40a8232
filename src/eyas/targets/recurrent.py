"""Recurrent and convolutional state of a target's layers (Mamba, gated delta nets, short
convolutions), for whole draft trees.

A state layer reads one token after another, each from the state after its predecessor. That state has no slots,
so nothing of it can be masked or cut off when a drafted token is rejected. So the nodes of a tree go through a
state layer level by level. Each node starts from the state of its parent, and its own state is stored for its
children.

    tree     0 --- 1 --- 3        step 0   node 0       from the committed state
                |--- 2            step 1   nodes 1, 2   both from the state of node 0, as two rows of one token
                                  step 2   node 3       from the state of node 1

When a path is accepted, the state of its last node becomes the row's committed state, and the other nodes'
states are dropped. No token is read twice, and rows accept different numbers of tokens without padding. Every
node is computed like a token of plain decoding: by the module's own forward, for one token (`run_levels`). All
other modules (attention, MLP, norms, lm_head) see the whole tree in one pass, as they do in other models. A
pass over a tree of depth d calls each state module d + 1 times.

The modules are the model's own (`targets.state_modules`), and during a forward the states are in
transformers' own cache layers. Prompts go through the modules in chunks, as in the model's
`generate`.

    mark     a copy of a row's state at some position. A text can be continued from its end or from a mark, and from nowhere else

Letters: B rows, R rows of a forward, T uncommitted nodes, Q new nodes among them, M nodes of one
level in all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from eyas.core import families
from eyas.core.extensions import TargetExtension, TargetState
from eyas.core.target import ForwardInput, Target, TargetSession
from eyas.targets.state_modules import (
    PROBE_TOKENS,
    Level,
    ProbeCache,
    StateModule,
    States,
    load_states,
    replace_forward,
    run_levels,
    stored_states,
    tree_levels,
)

__all__ = ["Extension", "RowStates", "state_modules"]

Forward = Callable[..., Any]

# Tokens of a prompt at a time for modules that cannot continue from a state with several tokens at once
# (`StateModule.reads_chunks`):
FIRST_CHUNK_MAMBA1 = 8192  # at the beginning of a text
LATER_CHUNK_MAMBA1 = 16  # later; each of these tokens has a state of its own in memory
MARKS = 2  # copies of the state that each row keeps at most: a prompt's end among them


class Extension(TargetExtension):
    """The state modules of a model."""

    order = 40
    own_forward_only: Mapping[str, str] = {
        "graphs": "no CUDA graphs: the host sorts the nodes of each tree by depth, for the model's recurrent state"
    }
    probe_tokens = PROBE_TOKENS

    @classmethod
    def applies(cls, model: PreTrainedModel) -> bool:
        return families.has_states(model)

    def __init__(self, target: Target) -> None:
        self.model, self.modules = target.model, tuple[StateModule, ...]()

    @contextmanager
    def probing(self) -> Iterator[Cache]:
        cache = ProbeCache(self.model)
        with cache.watching(self.model):
            yield cache

    def read_probe(self, cache: Cache) -> None:
        if isinstance(cache, ProbeCache):
            self.modules = cache.state_modules()

    def open(self, session: TargetSession) -> TargetState | None:
        if not self.modules:
            return None
        of_runner: TargetState | None = getattr(session.target.runner, "open_states", lambda rows: None)(session.rows)
        if of_runner is not None:  # it computes them itself
            return of_runner
        states = RowStates(self.modules, session.rows, len(session.target.layout), session.target.device)
        session.cache.layers = states.cache_layers
        return states


def state_modules(target: Target) -> tuple[StateModule, ...]:
    """Return the modules of a target that keep recurrent or convolutional state."""
    return next((one.modules for one in target.extensions if isinstance(one, Extension)), ())


class RowStates(TargetState):
    """The states of B rows: after the committed tokens, at the uncommitted nodes, and at marks.

    Attributes:
        cache_layers: the layers of a `transformers` cache that the modules read; the caller puts
            them into the cache.

    The states of a module are on the device on which the module computes. Tensors passed to this
    class are on the main device.
    """

    def __init__(self, modules: Sequence[StateModule], rows: int, layers: int, device: torch.device) -> None:
        self.modules, self.rows, self.device = tuple(modules), rows, device
        self.cache_layers: list[Any] = [LinearAttentionLayer() for _ in range(layers)]
        for module in modules:
            self.cache_layers[module.layer] = LinearAttentionLayer(number_of_states=module.states_of_layer)
        self.committed: list[States] = [_tensors(module, (rows,), torch.zeros) for module in modules]
        self.nodes: list[States] = [{} for _ in modules]  # [B, T, ...]
        self.node_count = 0  # T
        self.reads_chunks = all(module.reads_chunks for module in modules)
        # marks of each row: position -> states, oldest first
        self.marks: list[dict[int, list[States]]] = [{} for _ in range(rows)]
        # the last commit: (lengths before it, path_BP, committed nodes)
        self._path: tuple[Tensor, Tensor, Tensor] | None = None

    # --- forwards

    def max_chunk(self, row: int, length: int) -> int | None:
        if self.reads_chunks:
            return None
        return LATER_CHUNK_MAMBA1 if length else FIRST_CHUNK_MAMBA1

    def reading(self, inputs: ForwardInput, length_B: Tensor, fresh: bool) -> AbstractContextManager[None]:
        if not inputs.prompt:
            return self.tree(inputs.rows, inputs.depth_RT, inputs.visible_RQT)
        (row,) = inputs.rows
        return self.prompt(row, fresh) if self.reads_chunks or fresh else self.chunk(row, inputs, length_B)

    @contextmanager
    def chunk(self, row: int, inputs: ForwardInput, length_B: Tensor) -> Iterator[None]:
        """Let a forward of the model within this context read a later chunk of a prompt token by token; commit it
        then."""
        with self.tree(inputs.rows, inputs.depth_RT, inputs.visible_RQT):
            yield
        count_B = torch.zeros_like(length_B)
        count_B[row] = self.node_count
        self.advance(length_B, count_B)

    @contextmanager
    def prompt(self, row: int, fresh: bool) -> Iterator[None]:
        """Let a forward of the model within this context continue from the committed state of one row, and replace it.

        Args:
            fresh: the row is empty.
        """
        for module, states in zip(self.modules, self.committed, strict=True):
            self._load(module, None if fresh else {key: state[row : row + 1].clone() for key, state in states.items()})
        yield
        for module, states in zip(self.modules, self.committed, strict=True):
            for key, state in self._store(module).items():
                states[key][row] = state[0]

    @contextmanager
    def tree(self, rows: Sequence[int], depth_RT: Tensor, visible_RQT: Tensor) -> Iterator[None]:
        """Let a forward of the model within this context read Q new nodes of these rows; the committed states stay as
        they are."""
        R, Q, T = visible_RQT.shape
        levels, row_R = tree_levels(depth_RT, visible_RQT), torch.tensor(list(rows), device=self.device)
        self._grow(T, first=T == Q)
        all_rows = list(rows) == list(range(self.rows))
        on = {
            device: ([level.on(device) for level in levels], row_R.to(device))
            for device in {module.device for module in self.modules}
        }
        with ExitStack() as stack:
            for number, module in enumerate(self.modules):
                here, row_here_R = on[module.device]
                forward = self._level_by_level(
                    number, module.module.forward, here, None if all_rows else row_here_R, (R, Q), T - Q
                )
                replace_forward(module.module, forward, stack)
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
        """Return a forward that runs a state module's own, `forward`, once for each level."""
        module, committed, nodes = self.modules[number], self.committed[number], self.nodes[number]

        def load(level: Level) -> None:
            if level.parents_are_previous_level:
                return  # the parents' states are still where the module reads them
            row_M = level.row_M if row_R is None else row_R[level.row_M]
            if level.committed:
                self._load(module, {key: state[row_M] for key, state in committed.items()})
            else:
                self._load(module, {key: state[row_M, level.parent_M] for key, state in nodes.items()})

        def store(level: Level) -> None:
            for key, state in self._store(module).items():
                if row_R is None and level.column is not None:
                    nodes[key][:, earlier + level.column] = state  # equivalent to the indexing below, without a gather
                else:
                    nodes[key][level.row_M if row_R is None else row_R[level.row_M], earlier + level.node_M] = state

        return lambda *args, **kwargs: run_levels(module, forward, levels, shape, (args, kwargs), load, store)

    def _grow(self, count: int, first: bool) -> None:
        """Make room for the states of `count` nodes per row; earlier nodes' states stay unless these are the first."""
        for number, module in enumerate(self.modules):
            larger, old = _tensors(module, (self.rows, count), torch.empty), self.nodes[number]
            if not first:
                for key, state in larger.items():
                    state[:, : self.node_count] = old[key][:, : self.node_count]
            self.nodes[number] = larger
        self.node_count, self._path = count, None

    def _load(self, module: StateModule, states: States | None) -> None:
        load_states(self.cache_layers[module.layer], module.shapes, states)

    def _store(self, module: StateModule) -> States:
        return stored_states(self.cache_layers[module.layer], module.shapes)

    # --- commits

    def commit(self, length_B: Tensor, path_BP: Tensor, count_B: Tensor, active_B: Tensor) -> None:
        """Make the state of the last node of each active row's path its committed state.

        Args:
            length_B: number of committed tokens before this commit.
            path_BP: int64 node numbers; -1 past the end.
            count_B: nodes on the path; 0: the row stays as it is.
        """
        row_R = (active_B & (count_B > 0)).nonzero()[:, 0]
        last_R = path_BP[row_R, count_B[row_R] - 1]
        for module, committed, nodes in zip(self.modules, self.committed, self.nodes, strict=True):
            here_R, node_R = row_R.to(module.device), last_R.to(module.device)
            for key, state in committed.items():
                state[here_R] = nodes[key][here_R, node_R]
        self._path = length_B.clone(), path_BP, torch.where(active_B, count_B, 0)

    def advance(self, length_B: Tensor, count_B: Tensor) -> None:
        """Make the state of the last of the first `count_B` nodes, a chain, each row's committed
        state."""
        chain_BP = torch.arange(self.node_count, device=self.device).expand(self.rows, -1)
        self.commit(length_B, chain_BP, count_B, count_B > 0)

    # --- cutting, copying and emptying rows

    def prompt_read(self, row: int, length: int) -> None:
        self.mark(row, length)

    def mark(self, row: int, length: int) -> None:
        """Keep a copy of the row's committed state, the one after `length` tokens."""
        marks = self.marks[row]
        marks.pop(length, None)
        marks[length] = [{key: state[row].clone() for key, state in states.items()} for states in self.committed]
        while len(marks) > MARKS:
            del marks[next(iter(marks))]

    def longest_known_prefix(self, row: int, length_B: Tensor, max_length: int) -> int:
        """Return the largest number of tokens, up to `max_length`, after which the state is known."""
        if max_length >= (length := int(length_B[row])):
            return length
        known = {0, *self.marks[row], *self._path_lengths(row)}
        return max((n for n in known if n <= max_length), default=0)

    def _path_lengths(self, row: int) -> range:
        """Return the lengths within the last commit at which the row can be cut."""
        if self._path is None:
            return range(0)
        length_B, _, count_B = self._path
        before = int(length_B[row])
        return range(before + 1, before + 1 + int(count_B[row]))

    def truncate(self, row: int, length: int, length_B: Tensor) -> None:
        """Cut a row back to `length` tokens, at which its state is known
        (`TargetSession.longest_known_prefix`)."""
        if length != int(length_B[row]) and length:
            self._set_row(row, self._states_at(row, length))
        self._forget(row, length)

    def copy(self, source: int, row: int, length: int, length_B: Tensor) -> None:
        """Replace a row's state by another row's after its first `length` tokens."""
        if length:
            self._set_row(
                row,
                self._states_at(source, length)
                if length != int(length_B[source])
                else self._row_states(self.committed, source),
            )
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

    def _states_at(self, row: int, length: int) -> list[States]:
        if length in self.marks[row]:
            return self.marks[row][length]
        assert self._path is not None, "no state is known at this length"
        length_B, path_BP, _ = self._path
        node = int(path_BP[row, length - 1 - int(length_B[row])])
        return [{key: state[row, node] for key, state in states.items()} for states in self.nodes]

    def _row_states(self, states: Sequence[States], row: int) -> list[States]:
        return [{key: state[row] for key, state in module_states.items()} for module_states in states]

    def _set_row(self, row: int, states: Sequence[States]) -> None:
        for committed, new in zip(self.committed, states, strict=True):
            for key, state in committed.items():
                state[row] = new[key]

    def _forget(self, row: int, length: int) -> None:
        """Drop the known states after the row's first `length` tokens."""
        self.marks[row] = {at: states for at, states in self.marks[row].items() if at <= length}
        if self._path is not None:
            self._path[2][row] = 0
        if length == 0:
            for states in self.committed:
                for state in states.values():
                    state[row] = 0


def _tensors(module: StateModule, sizes: tuple[int, ...], make: Callable[..., Tensor]) -> States:
    return {
        key: make(*sizes, *shape, dtype=dtype, device=module.device) for key, (shape, dtype) in module.shapes.items()
    }
