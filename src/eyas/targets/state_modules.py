"""Modules of a model with recurrent or convolutional state: which there are, found by running the model, and how they read
the nodes of trees.

All families of transformers that keep such states in a cache reach them by four methods of it
(`get_conv_state`, `update_conv_state`, `get_recurrent_state`, `update_recurrent_state`). A
`ProbeCache` notes which module calls them. Then each module is tested alone, with the inputs that it had.
Reading one token after another, it must give the outputs that it gave for all of them at once, because trees
are read in that way (`targets.recurrent`). Some modules cannot continue from a state with several tokens at
once (Mamba 1 then starts from zeros, without an error). They are found by the same test, and continue a text
token by token.

Nodes of trees are read level by level, each level as a batch of rows of one token. `tree_levels` sorts nodes by depth;
`run_levels` runs one module over them. Linear layers act on each token alone. So the input projections run once
for all nodes, ahead of the levels, and the output projection runs once after them. Their weights, most of the
module's, are read once instead of once per level.

This module knows no rows and no family: the caller of `run_levels` puts the states of a level's parents where the module
reads them. Letters: R rows of a forward, T uncommitted nodes, Q new nodes among them, M nodes of one level in all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, LinearAttentionAndFullAttentionLayer

from eyas.errors import ModelError

__all__ = [
    "PROBE_TOKENS",
    "Level",
    "ProbeCache",
    "StateModule",
    "States",
    "load_states",
    "on_tokens",
    "replace_forward",
    "run_levels",
    "stored_states",
    "tree_levels",
]  # fmt: skip


PROBE_TOKENS = 6
TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-3}  # largest difference, relative to the largest output
# the same for 16-bit dtypes; a module that ignores its state differs by the size of its output
TOLERANCE_HALF = 0.1

Key = tuple[str, int]  # ("conv" or "recurrent", number of the state in its layer)
States = dict[Key, Tensor]  # a module's states; the first dimension of each tensor counts rows, or rows and nodes
Shapes = Mapping[Key, tuple[tuple[int, ...], torch.dtype]]  # without the rows


@dataclass(frozen=True)
class StateModule:
    """A module of the model that reads and writes states of one layer of the cache.

    Attributes:
        layer: number of the layer in the cache.
        shapes: shape, without the rows, and dtype of each state.
        device: the device on which the module computes, and on which its states are.
        states_of_layer: number of states of each kind that the whole layer has.
        reads_chunks: whether it can continue from a state with several tokens at once; else only
            token by token.
        input: which of its arguments is its input.
        first: linear layers that read its input and nothing else.
        last: the linear layer whose output is its output; None: there is none.
    """

    module: nn.Module
    layer: int
    shapes: Shapes
    device: torch.device
    states_of_layer: int
    reads_chunks: bool
    input: InputArgument
    first: tuple[nn.Linear, ...]
    last: nn.Linear | None


@dataclass(frozen=True)
class InputArgument:
    """The argument of a module that holds its input, the hidden states of the tokens.

    Attributes:
        argument: its position, or its name.
    """

    argument: int | str

    def read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """Return the tensor from the arguments of a call."""
        tensor: Tensor = args[self.argument] if isinstance(self.argument, int) else kwargs[self.argument]
        return tensor


@dataclass(frozen=True)
class _Call:
    """A call of a module: its arguments, and its output."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor

    @property
    def input(self) -> InputArgument:
        places: list[tuple[int | str, Any]] = [*enumerate(self.args), *self.kwargs.items()]
        return InputArgument(next(place for place, value in places if isinstance(value, Tensor)))


def load_states(layer: Any, shapes: Shapes, states: States | None) -> None:
    """Put states into a layer of a cache; None stands for the beginning of a text, at which there are
    none."""
    for kind, number in shapes:
        known = layer.is_conv_states_initialized if kind == "conv" else layer.is_recurrent_states_initialized
        known[number] = layer.has_previous_state[number] = states is not None
        if states is None:
            continue
        state = _tensors(layer, kind)[number] = states[kind, number]
        layer.device, layer.dtype = state.device, state.dtype
        if kind == "conv":
            layer.conv_kernel_size[number] = state.shape[-1]


def stored_states(layer: Any, shapes: Shapes) -> States:
    """Return the states that a module has left in a layer of a cache."""
    return {key: _tensors(layer, key[0])[key[1]] for key in shapes}


def _tensors(layer: Any, kind: str) -> dict[int, Tensor]:
    tensors: dict[int, Tensor] = layer.conv_states if kind == "conv" else layer.recurrent_states
    return tensors


class ProbeCache(Cache):
    """The cache of one forward over `PROBE_TOKENS` tokens. It takes keys, values and states for any
    layer, and notes which modules write states."""

    def __init__(self, model: Any) -> None:
        numbers = [
            module.layer_idx for module in model.modules() if isinstance(getattr(module, "layer_idx", None), int)
        ]
        config = model.config.get_text_config(decoder=True)
        self.states_of_layer = getattr(config, "number_of_conv_states", 1)
        super().__init__(layers=[self._layer() for _ in range(max([config.num_hidden_layers - 1, *numbers]) + 1)])
        self._running: list[nn.Module] = []  # the modules whose forward runs, outermost first
        # module -> the states that it has written, and the layer of each
        self._writers: dict[nn.Module, dict[Key, int]] = {}
        self._calls: dict[nn.Module, _Call] = {}
        self._written = set[tuple[str, int, int]]()  # kind, number, layer

    def _layer(self) -> LinearAttentionAndFullAttentionLayer:
        return LinearAttentionAndFullAttentionLayer(number_of_states=self.states_of_layer)

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Note the layer, and update its convolution's state as the library does."""
        self._note("conv", state_idx, layer_idx)
        return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Note the layer, and update its recurrent state as the library does."""
        self._note("recurrent", state_idx, layer_idx)
        return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)

    def _note(self, kind: str, number: int, layer: int) -> None:
        if not self._running:
            return
        if (kind, number, layer) in self._written:
            raise ModelError(
                f"the model cannot be served: several of its layers write into layer {layer} of the cache: give each layer a number of "
                "its own (layer_idx of its state module)"
            )
        self._written.add((kind, number, layer))
        self._writers.setdefault(self._running[-1], {})[kind, number] = layer

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Let the cache know within this context which module runs."""

        def begin(module: nn.Module, args: tuple[Any, ...]) -> None:
            self._running.append(module)

        def end(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            self._running.pop()
            if module in self._writers and module not in self._calls:
                self._calls[module] = _Call(args, kwargs, _first(output).clone())

        hooks = [module.register_forward_pre_hook(begin) for module in model.modules()]
        hooks += [module.register_forward_hook(end, with_kwargs=True) for module in model.modules()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def state_modules(self) -> tuple[StateModule, ...]:
        """Return the modules that have written states. Raise ModelError for one whose states cannot be handled."""
        found = []
        for module, written in self._writers.items():
            name, layers = type(module).__name__, set(written.values())
            if len(layers) > 1:
                raise ModelError(f"the model cannot be served: a {name} keeps the states of several layers")
            (layer,) = layers
            states = stored_states(self.layers[layer], dict.fromkeys(written))  # type: ignore[arg-type]
            shapes = {key: (tuple(state.shape[1:]), state.dtype) for key, state in states.items()}
            if not self._gives_the_same(module, layer, [1] * PROBE_TOKENS):
                raise ModelError(
                    f"the model cannot be served: a {name} gives other outputs token by token than for all tokens at once"
                )
            half = PROBE_TOKENS // 2
            reads_chunks = self._gives_the_same(module, layer, [half, PROBE_TOKENS - half])
            first, last = self._projections(module, layer)
            place, device = self._calls[module].input, next(iter(states.values())).device
            found.append(
                StateModule(module, layer, shapes, device, self.states_of_layer, reads_chunks, place, first, last)
            )
        return tuple(found)

    def _projections(self, module: nn.Module, layer: int) -> tuple[tuple[nn.Linear, ...], nn.Linear | None]:
        """Return (linear layers that read the module's input and nothing else, the linear layer whose output is the
        module's output or None)."""
        call, ran = self._calls[module], list[tuple[nn.Linear, Tensor, Tensor, Tensor]]()

        def note(linear: Any, args: tuple[Any, ...], output: Tensor) -> None:
            ran.append((linear, args[0], output, output.clone()))

        # accelerate puts a forward of its own on a layer whose weights it moves
        linears = [child for child in module.modules() if isinstance(child, nn.Linear) and "forward" not in vars(child)]
        hooks = [linear.register_forward_hook(note) for linear in linears]
        try:
            self.layers[layer] = self._layer()
            made = module(*call.args, **call.kwargs)
        finally:
            for hook in hooks:
                hook.remove()
        once = [one for one in ran if sum(one[0] is other[0] for other in ran) == 1]
        begin = call.input.read(call.args, call.kwargs)
        first = tuple(linear for linear, read, _, _ in once if read is begin)
        last = next((linear for linear, _, output, was in once if output is made and torch.equal(output, was)), None)
        return first, None if last in first else last

    def _gives_the_same(self, module: nn.Module, layer: int, pieces: list[int]) -> bool:
        """Return whether the module gives the outputs of its call again if it reads the same tokens from
        the beginning in pieces of these sizes."""
        call, outputs, at = self._calls[module], [], 0
        self.layers[layer] = self._layer()
        for count in pieces:
            part = slice(at, at + count)
            outputs.append(_first(module(*_tokens_of(call.args, part), **_tokens_of(call.kwargs, part))))
            at += count
        difference = (torch.cat(outputs, 1) - call.output).abs().max()
        return bool(difference <= TOLERANCES.get(call.output.dtype, TOLERANCE_HALF) * call.output.abs().max())


def _first(output: Any) -> Tensor:
    tensor: Tensor = output if isinstance(output, Tensor) else output[0]
    return tensor


def _tokens_of(value: Any, part: slice) -> Any:
    return on_tokens(value, lambda tensor: tensor[:, part], PROBE_TOKENS)


def on_tokens(value: Any, change: Callable[[Tensor], Tensor], tokens: int) -> Any:
    """Change the tensors [rows, tokens, ...] in a module's arguments."""
    if isinstance(value, Tensor):
        return change(value) if value.ndim >= 2 and value.shape[1] == tokens else value
    if isinstance(value, tuple | list):
        return type(value)(on_tokens(one, change, tokens) for one in value)
    if isinstance(value, dict):
        return {name: on_tokens(one, change, tokens) for name, one in value.items()}
    return value


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
    projections = _Projections(module, args, kwargs) if len(levels) > 1 else _Projections()
    with ExitStack() as patches:  # closed by this frame, so that Ctrl-C at any point leaves no forward replaced
        projections.replace_forwards(patches)
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

    def replace_forwards(self, patches: ExitStack) -> None:
        """Replace the forwards of these layers until `patches` is closed."""
        for linear in self._whole:
            replace_forward(linear, self._first(linear, linear.forward), patches)
        if self._module is not None and self._module.last is not None:
            replace_forward(self._module.last, self._last(self._module.last), patches)

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


def replace_forward(module: Any, forward: Forward, patches: ExitStack) -> None:
    """Let the calling thread's calls of the module run `forward` until `patches` is closed. Its class is not changed, and a
    forward of the instance (accelerate's) is put back afterwards. Ctrl-C at any point before that leaves nothing."""
    attributes = vars(module)
    before, own, thread = attributes.get("forward"), module.forward, get_ident()
    put_back = (attributes.pop, "forward", None) if before is None else (attributes.__setitem__, "forward", before)
    patches.callback(*put_back)  # before it is replaced, and without code of Python's, in which Ctrl-C could end it
    attributes["forward"] = lambda *args, **kwargs: (forward if get_ident() == thread else own)(*args, **kwargs)


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
