"""Models that somebody has pruned or edited in memory: each edit changes one thing that a kernel or a check could overlook.

python tests/edited.py NAME ... tries them with compiled kernels: prints a line each, and ends with 1 if one answers with other
ids than transformers' generate. A child process, as kernels that read past a matrix end it.
"""

import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

import eyas
from eyas.errors import EyasError
from reference import generated

PROMPT, NEW = list(range(3, 35)), 12
Edit = Callable[[Any], None]


def plain(model: PreTrainedModel) -> list[int]:
    return generated(model, PROMPT, NEW)


def _linear(old: nn.Linear, out: int | None = None, inp: int | None = None, bias: bool | None = None) -> nn.Linear:
    has_bias = old.bias is not None if bias is None else bias
    made = nn.Linear(inp or old.in_features, out or old.out_features, bias=has_bias, dtype=torch.float32, device="cpu")
    nn.init.normal_(made.weight, std=0.3)
    return made


def _mlp(layer: int, width: int) -> Edit:
    def edit(model: Any) -> None:
        mlp = model.model.layers[layer].mlp
        mlp.gate_proj, mlp.up_proj = _linear(mlp.gate_proj, width), _linear(mlp.up_proj, width)
        mlp.down_proj = _linear(mlp.down_proj, inp=width)

    return edit


def _queries(layer: int, heads: int) -> Edit:
    def edit(model: Any) -> None:
        attention = model.model.layers[layer].self_attn
        attention.q_proj = _linear(attention.q_proj, heads * attention.head_dim)
        attention.o_proj = _linear(attention.o_proj, inp=heads * attention.head_dim)
        attention.num_key_value_groups = heads // 2

    return edit


def _keys(layer: int) -> Edit:
    def edit(model: Any) -> None:
        attention = model.model.layers[layer].self_attn
        attention.k_proj, attention.v_proj = _linear(attention.k_proj, 64), _linear(attention.v_proj, 64)
        attention.num_key_value_groups = 1

    return edit


def _replaced(path: str, make: Callable[[Any], nn.Module]) -> Edit:
    def edit(model: Any) -> None:
        parent, _, name = path.rpartition(".")
        owner = model.get_submodule(parent)
        setattr(owner, name, make(getattr(owner, name)))

    return edit


def _set(path: str, value: Any) -> Edit:
    def edit(model: Any) -> None:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, value)

    return edit


def _without(layer: int) -> Edit:
    def edit(model: Any) -> None:
        model.model.layers = nn.ModuleList([one for k, one in enumerate(model.model.layers) if k != layer])
        model.config.num_hidden_layers -= 1
        for k, one in enumerate(model.model.layers):
            one.self_attn.layer_idx = k

    return edit


def _quantised(path: str) -> Edit:
    def quantise(old: Any) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.ao.quantization.quantize_dynamic(nn.Sequential(old), {nn.Linear}, dtype=torch.qint8)[0]

    return _replaced(path, quantise)


class _Adapted(nn.Module):
    """As libraries of adapters make them: attributes of the layer that it wraps, and more in its forward."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.weight, self.bias = base, base.weight, base.bias
        self.in_features, self.out_features = base.in_features, base.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) - x


NORM: dict[str, Any] = {"normalized_shape": 64, "dtype": torch.float32, "device": "cpu"}
EDITS: dict[str, Edit] = {
    "nothing": lambda model: None,
    "a narrow MLP": _mlp(1, 64),
    "a wide MLP": _mlp(2, 1024),
    "an odd MLP": _mlp(1, 50),
    "gate and up differ": _replaced("model.layers.1.mlp.up_proj", lambda old: _linear(old, 1)),
    "fewer heads": _queries(1, 2),
    "more keys": _keys(1),
    **{
        f"a bias of {part}": _replaced(f"model.layers.1.{part}_proj", lambda old: _linear(old, bias=True))
        for part in ("self_attn.q", "self_attn.k", "mlp.gate", "mlp.up")
    },
    "torch's norm": _replaced("model.layers.1.input_layernorm", lambda old: nn.RMSNorm(**NORM)),
    "no last norm": _replaced("model.norm", lambda old: nn.Identity()),
    "an epsilon": _set("model.layers.2.post_attention_layernorm.variance_epsilon", 0.5),
    "an activation": _set("model.layers.2.mlp.act_fn", nn.GELU()),
    "an adapter": _replaced("model.layers.1.self_attn.q_proj", _Adapted),
    "a head with a bias": _replaced("lm_head", lambda old: _linear(old, bias=True)),
    "more embeddings": lambda model: model.resize_token_embeddings(170, mean_resizing=False),
    "a layer less": _without(1),
    "quantised gates": _quantised("model.layers.1.mlp.gate_proj"),
    "a quantised model": lambda model: [
        _quantised(f"model.layers.{k}.{part}_proj")(model)
        for k in range(4)
        for part in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
    ],
}


def answer(model: PreTrainedModel, **settings: Any) -> list[int] | str:
    """The ids of eyas, or the line with which it refuses."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the model runs by its own forward")
        try:
            llm = eyas.load(model, tokenizer=False, **{"method": "suffix", **settings})
            return list(llm.generate(PROMPT, max_new_tokens=NEW, ignore_eos=True).token_ids)
        except EyasError as error:
            return str(error)


def main() -> int:
    from test_defaults import llama

    wrong = 0
    for name in sys.argv[1:]:
        torch.manual_seed(len(name))
        model = llama()
        EDITS[name](model)
        # torch rounds the inputs of a quantised layer by all tokens of a pass, so trees have other ids, as load says
        method = "vanilla" if "quantised" in name else "suffix"
        wanted, got = plain(model), answer(model, kernels="on", method=method)
        print(name, "is right" if got == wanted else f"is WRONG: {got} instead of {wanted}", flush=True)
        wrong += got != wanted
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
