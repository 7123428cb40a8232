"""A model without some of its layers, and the search for the layers that matter least to its
distribution.

`without` makes new containers around the same modules and the same weights:

    model ---- base ---- layers [0 1 2 3 4 5]            the user's model, which is not touched
                            |   |       |
    view  ---- base ---- layers [0 1     4 5a]           5a: layer 5 with nothing in the place of its attention

so nothing has to be restored, and the view costs no memory. A layer keeps its number, and its place
in a cache.

`search` is greedy; Draft & Verify (Zhang et al. 2023, section 3.3) uses Bayesian optimisation. It leaves out,
one by one, the part whose absence costs least acceptance on the target's own text. It returns the set that
makes decoding fastest by Leviathan et al. 2023, theorem 3.8. The cost of a draft step is the share of the
weights that it reads.

This module knows no drafter. Letters: L layers, R sequences of T tokens, V vocabulary.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from eyas.core.sampling import GumbelNoise
from eyas.core.target import Target
from eyas.core.tree import Tree
from eyas.errors import ModelError, OptionError

__all__ = ["TEXT_LENGTH", "TEXT_ROWS", "Found", "Part", "format_parts", "own_text", "parse_parts", "search", "without"]

Part = tuple[int, str]  # (layer, ATTENTION or MLP)
ATTENTION, MLP = "a", "m"
CLASSES = {ATTENTION: re.compile(r"Attention$"), MLP: re.compile(r"(MLP|Mlp|MoE|Moe|MoeBlock|FeedForward)$")}
DEPTHS = range(1, 9)  # chain lengths that a search tries
TEXT_ROWS, TEXT_LENGTH = 4, 64  # size of the target's own text that a search reads
# parts that a round of the search tries: those that were missed least when they alone were left out
PARTS_PER_ROUND = 3
HOPELESS = 0.7  # the search ends when its speed-up falls below this share of its best


@dataclass(frozen=True)
class Found:
    """The result of a search."""

    skip: str  # what --skip takes
    depth: int  # draft tokens of the chain
    acceptance: float  # expected acceptance of a draft token at temperature 1, on the text that was searched with
    cost: float  # cost of a draft step, in steps of the whole model
    speedup: float  # expected from acceptance, cost and depth


def parse_parts(text: str, layers: int) -> frozenset[Part]:
    """Read '3,5a,7m' as layer 3, the attention of layer 5 and the MLP of layer 7; 'exit:4' as all from layer 4 on.
    Raise OptionError for anything else."""
    found = set[Part]()
    if exit_at := re.fullmatch(r"exit:(\d+)", text):
        found = {(k, kind) for k in range(int(exit_at[1]), layers) for kind in CLASSES}
    else:
        for piece in text.split(","):
            part = re.fullmatch(r"(\d+)([am]?)", piece.strip())
            if part is None:
                raise OptionError(
                    f"skip: {piece.strip()!r} is not a layer (3), an attention (3a) or an MLP (3m); exit:N and auto are possible, too"
                )
            found |= {(int(part[1]), kind) for kind in part[2] or CLASSES}
    if any(k >= layers for k, _ in found):
        raise OptionError(
            f"skip: layer {max(found)[0]} does not exist: the target has {layers} layers (0..{layers - 1})"
        )
    kept = {(k, kind) for k in range(layers) for kind in CLASSES} - found
    if not found or not kept:
        raise OptionError(
            f"skip: {text!r} leaves out {'nothing' if kept else 'everything'}: some of the {layers} layers must go, some stay"
        )
    return frozenset(found)


def format_parts(parts: Iterable[Part]) -> str:
    """Return the text that `parse_parts` reads."""
    kinds: dict[int, str] = {}
    for layer, kind in sorted(parts):
        kinds[layer] = kinds.get(layer, "") + kind
    return ",".join(f"{layer}{kind if len(kind) == 1 else ''}" for layer, kind in kinds.items())


# --- the view --------------------------------------------------------------------------------------------------------------------------


def without(target: Target, skipped: frozenset[Part]) -> Target:
    """Return the target with parts left out: the same modules in new containers. Raise ModelError where a part cannot
    be told."""
    model, layers = target.model, target.family.layers
    text: Any = model.config.get_text_config(decoder=True)
    if target.family.shares_keys or bool(getattr(text, "hidden_size_per_layer_input", 0)):
        raise ModelError(
            f"layers of a {target.family.model_type} read keys or inputs that belong to their number, so none can be left out: "
            "choose another method than self_speculative"
        )
    gone = [k for k in range(len(layers)) if all((k, kind) in skipped for kind in CLASSES)]
    kept = [k for k in range(len(layers)) if k not in gone]
    output_kinds = _output_kinds(target, [part for part in skipped if part[0] not in gone])
    path = next(name for name, module in model.named_modules() if module is layers).split(".")
    configs = _configs(model.config, kept, len(layers))
    view: Any = _shallow(model, configs)
    parent = view
    for name in path[:-1]:
        parent._modules[name] = _shallow(parent._modules[name], configs)
        parent = parent._modules[name]
    parent._modules[path[-1]] = nn.ModuleList(
        [_layer(layers[k], k, [part for part in output_kinds if part[0] == k], output_kinds) for k in kept]
    )
    made = Target(view, f"{target.name} without {format_parts(skipped)}")
    made.adapters = target.adapters
    return made


def _shallow(module: nn.Module, configs: dict[int, Any]) -> nn.Module:
    """Return a module with the same parameters and children, in dicts of its own that may be changed."""
    if "forward" in vars(module):
        raise ModelError(
            "the model's forward was replaced (by accelerate?), so its layers cannot be left out: load it on one device"
        )
    twin = copy.copy(module)
    twin.__dict__ = {
        name: copy.copy(value) if isinstance(value, dict) else value for name, value in vars(module).items()
    }
    config = twin.__dict__.get("config")
    if id(config) in configs:
        twin.__dict__["config"] = configs[id(config)]
    return twin


def _configs(config: Any, kept: Sequence[int], layers: int) -> dict[int, Any]:
    """Return, by the id of a configuration, the same with fewer layers, for the model's and, where it is another, the
    text decoder's."""
    text = config.get_text_config(decoder=True)
    fewer = copy.copy(text)
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == layers:  # one entry a layer, like layer_types
            setattr(fewer, name, [value[k] for k in kept])
    fewer.num_hidden_layers = len(kept)
    computed = {
        name: [value[k] for k in kept]
        for name, member in inspect.getmembers(type(text), lambda member: isinstance(member, property))
        if isinstance(value := getattr(text, name, None), list) and len(value) == layers
    }
    if computed:  # Jamba and Bamba compute the kinds of layers from their numbers
        fewer.__class__ = type(type(text).__name__, (type(text),), computed)
    found = {id(text): fewer}
    if config is not text:
        whole = copy.copy(config)
        for name, value in list(vars(config).items()):
            if value is text:
                setattr(whole, name, fewer)
        found[id(config)] = whole
    return found


def _layer(layer: nn.Module, number: int, parts: Sequence[Part], output_kinds: dict[Part, int | None]) -> nn.Module:
    arguments = list(inspect.signature(layer.forward).parameters)
    told_number = "layer_idx" in arguments  # Zamba's layers are told their place among those that are there
    if not parts and not told_number:
        return layer
    twin: Any = _shallow(layer, {})
    for part in parts:
        twin._modules[_name_of(layer, part[1])] = _ZeroModule(output_kinds[part])
    if told_number:
        place = arguments.index("layer_idx")

        def tell(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            if place < len(args):
                return (*args[:place], number, *args[place + 1 :]), kwargs
            return args, {**kwargs, "layer_idx": number}

        twin.register_forward_pre_hook(tell, with_kwargs=True)
    return twin  # type: ignore[no-any-return]


def _name_of(layer: nn.Module, kind: str) -> str:
    """Return the name of a layer's attention or MLP."""
    names = [name for name, child in layer.named_children() if CLASSES[kind].search(type(child).__name__)]
    if len(names) != 1:
        what = {ATTENTION: "attention", MLP: "MLP"}[kind]
        raise ModelError(
            f"the {what} of a {type(layer).__name__} is not found by its name: leave whole layers out, like --skip 3,5"
        )
    return names[0]


def _output_kinds(target: Target, parts: Iterable[Part]) -> dict[Part, int | None]:
    """Return the kind of each part's output: None = a tensor; n = a tuple of a tensor and n further values.
    Observed in one pass over two tokens."""
    found: dict[Part, int | None] = {}

    def look(part: Part) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            found[part] = len(output) - 1 if isinstance(output, tuple) else None

        return hook

    layers = target.family.layers
    places = {part: layers[part[0]].get_submodule(_name_of(layers[part[0]], part[1])) for part in parts}
    hooks = [module.register_forward_hook(look(part)) for part, module in places.items()]
    try:
        if hooks:
            with torch.no_grad():
                target.family.base(input_ids=torch.zeros(1, 2, dtype=torch.long, device=target.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found


class _ZeroModule(nn.Module):
    """Takes the place of a part: returns zeros, so the residual stream stays as it is."""

    def __init__(self, more: int | None) -> None:
        super().__init__()
        self.more = more

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        zeros = torch.zeros_like(args[0] if args else kwargs["hidden_states"])
        return zeros if self.more is None else (zeros, *([None] * self.more))


# --- the search ------------------------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def own_text(target: Target, rows: int = TEXT_ROWS, length: int = TEXT_LENGTH, seed: int = 0) -> Tensor:
    """Return text that the target samples at temperature 1, int64 [R, T], with random numbers that no request
    reads."""
    config = target.model.config.get_text_config(decoder=True)
    known = range(target.vocab_size)
    begin = next((i for i in (config.bos_token_id, config.eos_token_id) if isinstance(i, int) and i in known), 0)
    session, device = target.open(rows), target.device
    noise = GumbelNoise(
        torch.arange(seed, seed + rows, device=device), torch.zeros(rows, dtype=torch.bool, device=device), False
    )
    tokens, root = [torch.full((rows, 1), begin, device=device)], Tree.chain(rows, 1, device)
    for position in range(1, length):
        output = session.forward(tokens[-1], root)
        session.advance(torch.ones(rows, dtype=torch.long, device=device), [position] * rows)
        gumbel_R1V = noise.gumbel(
            torch.full((rows, 1), position, device=device), output.logits_BNV.shape[-1], GumbelNoise.SEARCH
        )
        tokens.append((output.logits_BNV.float().log_softmax(-1) + gumbel_R1V).argmax(-1))
    return torch.cat(tokens, 1)


@torch.inference_mode()
def search(target: Target, tokens_RT: Tensor) -> Found:
    """Return the parts to leave out, and how many tokens to draft then.

    Args:
        tokens_RT: int64, text like the decoded one; `own_text` where there is none.
    """
    p_MV = _distribution(target, tokens_RT)
    sizes = _sizes(target)
    whole = sum(sizes.values()) + _num_weights(target.family.head)

    def acceptance(parts: frozenset[Part]) -> float:
        return float(torch.minimum(p_MV, _distribution(without(target, parts), tokens_RT)).sum(-1).mean())

    def expected(alpha: float, parts: frozenset[Part]) -> Found:
        cost = 1 - sum(sizes[part] for part in parts) / whole
        best, depth = max((_speedup(alpha, cost, depth), depth) for depth in DEPTHS)
        return Found(format_parts(parts), depth, round(alpha, 4), round(cost, 4), round(best, 4))

    alone = {part: acceptance(frozenset([part])) for part in sizes}
    found = [expected(alpha, frozenset([part])) for part, alpha in alone.items()]
    parts, rest = frozenset[Part](), sorted(sizes, key=lambda part: -alone[part])
    while len(rest) > 1:
        tried = {part: acceptance(parts | {part}) if parts else alone[part] for part in rest[:PARTS_PER_ROUND]}
        gone = max(tried, key=lambda part: tried[part])
        parts = parts | {gone}
        rest.remove(gone)
        found.append(expected(tried[gone], parts))
        if found[-1].speedup < HOPELESS * max(one.speedup for one in found):
            break
    return max(found, key=lambda one: one.speedup)


def _distribution(target: Target, tokens_RT: Tensor) -> Tensor:
    """Return the target's distribution after every token, [R * T, V]."""
    return target.head(target.encode(tokens_RT, (target.num_layers,))).float().softmax(-1).flatten(0, 1)


def _num_weights(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


def _sizes(target: Target) -> dict[Part, int]:
    """Return how many weights every part has."""
    layers, found = target.family.layers, dict[Part, int]()
    for k, layer in enumerate(layers):
        for kind in CLASSES:
            found[k, kind] = _num_weights(layer.get_submodule(_name_of(layer, kind)))
    return found


def _speedup(alpha: float, cost: float, depth: int) -> float:
    """Return the expected speed-up (Leviathan et al. 2023, theorem 3.8)."""
    tokens = depth + 1.0 if alpha >= 1 else (1 - alpha ** (depth + 1)) / (1 - alpha)
    return tokens / (depth * cost + 1)
