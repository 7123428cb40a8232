"""Which modules of a model have recurrent or convolutional state, found by running it.

All families of transformers that keep such states in a cache reach them by four methods of it
(`get_conv_state`, `update_conv_state`, `get_recurrent_state`, `update_recurrent_state`). A
`ProbeCache` notes which module calls them. Then each module is tested alone, with the inputs that
it had: reading one token after another, it must give the outputs that it gave for all of them at
once, because trees are read in that way (`targets.recurrent`). Some modules cannot continue from a
state with several tokens at once (Mamba 1 then starts from zeros, without an error). They are found
by the same test, and continue a text token by token.

This module knows no tree, no row and no family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, LinearAttentionAndFullAttentionLayer

from eyas.errors import ModelError

__all__ = ["PROBE_TOKENS", "ProbeCache", "StateModule", "States", "load_states", "on_tokens", "stored_states"]

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
        self._note("conv", state_idx, layer_idx)
        return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
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
