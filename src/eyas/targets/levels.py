"""State modules read the nodes of trees level by level, each level as a batch of rows of one token.

`tree_levels` sorts nodes by depth; `run_levels` runs one module over them. Linear layers act on
each token alone. So those that read the module's input (the input projections) run once for all
nodes before the levels, and the one that makes its output (the output projection) once after them:
their weights, most of the module's, are read once instead of once per level.

This module knows no cache and no rows: the caller of `run_levels` puts the states of a level's
parents where the module reads them.
Letters: R rows of a forward, T uncommitted nodes, Q new nodes among them, M nodes of one level in
all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from eyas.targets.state_modules import StateModule, on_tokens

__all__ = ["Level", "replaced_forward", "run_levels", "tree_levels"]

Forward = Callable[..., Any]


@dataclass(frozen=True)
class Level:
    """The new nodes of one depth, in all rows of a forward."""

    row_M: Tensor  # int64; row of the forward
    node_M: Tensor  # int64; number among the Q new nodes
    parent_M: Tensor  # int64; number among all T nodes; -1: the committed state
    committed: bool  # the nodes start from the committed states
    column: int | None  # the node's number if it is the same in each of the R rows, which come in order; else None
    parents_are_previous_level: bool  # the parents are the nodes of the level before, in the same order

    def on(self, device: torch.device) -> Level:
        """Return the level with its tensors on another device."""
        if device == self.row_M.device:
            return self
        return replace(
            self, row_M=self.row_M.to(device), node_M=self.node_M.to(device), parent_M=self.parent_M.to(device)
        )

    def select(self, value: Any, shape: tuple[int, int]) -> Any:
        """Return a module's arguments for these nodes alone: tensors [R, Q, ...] become [M, 1, ...]."""

        def nodes(tensor: Tensor) -> Tensor:
            every = tensor.expand(shape[0], *tensor.shape[1:])
            if self.column is not None:
                return every[:, self.column : self.column + 1]
            return every[self.row_M, self.node_M][:, None]

        return on_tokens(value, nodes, shape[1])


def tree_levels(depth_RT: Tensor, visible_RQT: Tensor) -> list[Level]:
    """Return the new nodes by depth, parents before children. The parent of a node is the deepest node
    that it attends to, other than itself."""
    R, Q, T = visible_RQT.shape
    own_QT = torch.arange(T - Q, T, device=depth_RT.device)[:, None] == torch.arange(T, device=depth_RT.device)
    ancestor_RQT = visible_RQT & ~own_QT
    deepest_RQ, parent_RQ = torch.where(ancestor_RQT, depth_RT[:, None], -1).max(-1)
    parent_RQ = torch.where(deepest_RQ < 0, -1, parent_RQ)
    new_RQ = depth_RT[:, T - Q :]
    levels, before = [], list[tuple[int, int]]()
    for depth in sorted(set(new_RQ.flatten().tolist())):
        row_M, node_M = (new_RQ == depth).nonzero(as_tuple=True)
        parent_M = parent_RQ[row_M, node_M]
        rows, nodes, parents = row_M.tolist(), node_M.tolist(), parent_M.tolist()
        column = nodes[0] if rows == list(range(R)) and len(set(nodes)) == 1 else None
        parents_are_previous_level = list(zip(rows, parents, strict=True)) == before
        levels.append(Level(row_M, node_M, parent_M, min(parents) < 0, column, parents_are_previous_level))
        before = [(row, T - Q + node) for row, node in zip(rows, nodes, strict=True)]
    return levels


def run_levels(
    module: StateModule,
    forward: Forward,
    levels: Sequence[Level],
    shape: tuple[int, int],
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    load: Callable[[Level], None],
    store: Callable[[Level], None],
) -> Any:
    """Return the output [R, Q, ...] of a state module for all nodes.

    Args:
        forward: the module's own forward.
        shape: (R, Q).
        arguments: the arguments of the call, for all nodes.
        load, store: called before and after each level.
    """
    args, kwargs = arguments
    outputs = []
    with _Projections(module, args, kwargs) if len(levels) > 1 else _Projections() as projections:
        for level in levels:
            load(level)
            level_args, level_kwargs = level.select(args, shape), level.select(kwargs, shape)
            projections.begin_level(level, shape, level_args, level_kwargs)
            outputs.append(projections.output(forward(*level_args, **level_kwargs)))
            store(level)
    return projections.finish(_join(outputs, levels, shape))


class _Projections:
    """The linear layers at the beginning and at the end of a state module, while it reads levels.
    Without a module: none."""

    def __init__(
        self, module: StateModule | None = None, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> None:
        self._module = module
        # the outputs of the first layers, for all nodes
        self._whole = (
            {} if module is None else {linear: linear(module.input.read(args, kwargs or {})) for linear in module.first}
        )
        self._part: dict[Any, Tensor] = {}  # the outputs of the first layers, for the present level
        self._input: Tensor | None = None  # the module's input, at the present level
        self._last_input: Tensor | None = None  # the last layer's input, at the present level
        self._patches = ExitStack()

    def __enter__(self) -> _Projections:
        with ExitStack() as patches:
            for linear in self._whole:
                patches.enter_context(replaced_forward(linear, self._first(linear, linear.forward)))
            if self._module is not None and self._module.last is not None:
                patches.enter_context(replaced_forward(self._module.last, self._last(self._module.last)))
            self._patches = patches.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._patches.close()

    def _first(self, linear: Any, forward: Forward) -> Forward:
        return lambda value: self._part[linear] if value is self._input else forward(value)

    def _last(self, linear: Any) -> Forward:
        def keep_input(value: Tensor) -> Tensor:
            self._last_input = value
            return value.new_empty(*value.shape[:-1], linear.out_features)

        return keep_input

    def begin_level(self, level: Level, shape: tuple[int, int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Prepare the module's next call, which is for this level, with these arguments."""
        self._part = {linear: level.select(output, shape) for linear, output in self._whole.items()}
        self._input = None if self._module is None else self._module.input.read(args, kwargs)

    def output(self, output: Any) -> Any:
        """Return the tensors of a call to collect: the input of the last layer if that has still to run,
        else the call's `output`."""
        last_input, self._last_input = self._last_input, None
        return output if last_input is None else last_input

    def finish(self, joined: Any) -> Any:
        return joined if self._module is None or self._module.last is None else self._module.last(joined)


@contextmanager
def replaced_forward(module: Any, forward: Forward) -> Iterator[None]:
    """Let the calling thread's calls of the module run `forward` within this context. Its class is not changed, and a
    forward of the instance (accelerate's) is put back afterwards."""
    attributes = vars(module)
    before, own, thread = attributes.get("forward"), module.forward, get_ident()
    attributes["forward"] = lambda *args, **kwargs: (forward if get_ident() == thread else own)(*args, **kwargs)
    try:
        yield
    finally:  # without a call, at which Ctrl-C could leave it
        del attributes["forward"]
        if before is not None:
            attributes["forward"] = before


def _join(outputs: Sequence[Any], levels: Sequence[Level], shape: tuple[int, int]) -> Any:
    """Return the outputs [M, 1, ...] of all levels as one of [R, Q, ...]."""
    if isinstance(outputs[0], tuple | list):
        parts = ([output[i] for output in outputs] for i in range(len(outputs[0])))
        return type(outputs[0])(_join(part, levels, shape) for part in parts)
    if not isinstance(outputs[0], Tensor):
        return outputs[0]
    if [level.column for level in levels] == list(range(shape[1])):
        return torch.cat(list(outputs), 1)
    order_M = torch.cat([level.row_M * shape[1] + level.node_M for level in levels]).argsort()
    return torch.cat(list(outputs))[order_M].reshape(*shape, *outputs[0].shape[2:])
