"""Runs a target's forwards on a CPU by compiled kernels.

The kernels know the decoder layers of the model types in FAMILIES. A new runner's logits and features over a
prompt and a small tree are compared with the model's own forward, once for each model and machine (_proofs.py).
If they differ, the runner is refused. The model is not changed: the kernels keep a copy of its weights, without
loss in the narrowest format that holds them, or rounded on request (`WeightFormat`).

A token's logits do not depend, to the last bit, on the other tokens of the pass. So a tree's logits
equal plain decoding's exactly, not only up to rounding.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from eyas import kernels
from eyas.core.cycle import CycleRunner
from eyas.core.ops import Ops
from eyas.core.target import ForwardInput, Target
from eyas.core.tree import TargetOutput, Tree
from eyas.errors import OptionError, one_line
from eyas.kernels import EXACT, HEAD_DIMS, Layers, LayerSizes, Pass, ThreadCount, WeightFormat, floats
from eyas.runners._comparison import UnsuitedError, output_pairs
from eyas.runners._layer_settings import layer_windows, norm_eps
from eyas.runners._packing import Packing, check_fit, packing_of
from eyas.runners._proofs import Proof
from eyas.runners._threads import Threads
from eyas.runners.cpu_ops import CpuOps
from eyas.runners.stored import StoredLinear, stored_in

__all__ = ["FAMILIES", "CpuRunner", "UnsuitedError", "make_cpu_runner"]

# Model types whose decoder layers are: norm, attention with RoPE (norms of heads and biases are
# optional), norm, gated MLP.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROPES = ("default", "linear", "llama3", "yarn")  # kinds of RoPE whose frequencies do not depend on the length
CHECKED_LAYERS = 2  # of a model whose weights stay in their file, whose own forward is slow
TURNS = 6  # timed forwards for each number of threads, the warm-up included
TIMING_SECONDS = 0.25  # after which no further turn begins, but two
TOLERANCE = 1e-4  # relative to the largest logit; another order of summation changes less


def make_cpu_runner(target: Target, weight_format: WeightFormat = EXACT, own: bool = False) -> CpuRunner:
    """Return the target's runner by compiled kernels.

    Args:
        own: eyas loaded the model from files, so it equals the files, and findings of an earlier load are still true.
        weight_format: the number format of its linear layers. A rounded format makes another
            target: plain decoding and trees both use it.

    Raises:
        UnsuitedError: the kernels cannot run this target, or this machine lacks instructions that the format needs.
        OptionError: the format would change nothing.
    """
    if (missing := kernels.why_not()) is not None:
        raise UnsuitedError(f"no compiled kernels: {missing}")
    _refuse(target)  # before its weights are read
    if stored_in(target.model) is not None:
        check_fit(target, weight_format)
    proof = Proof(target) if own else None
    known = proof is not None and proof.known
    made, checkpoint = None, stored_in(target.model)
    if checkpoint is not None and not known:
        few = Target(checkpoint.model(min(CHECKED_LAYERS, target.num_layers)), target.name)
        CpuRunner(few).check()
    if weight_format.weights == "exact" or not (known or checkpoint):
        made = CpuRunner(target)
    if made is not None and not (known or checkpoint):
        made.check()
    if proof is not None and not known:
        proof.keep()
    _check_weight_format(weight_format, made)
    if made is None or not weight_format.exact:
        made = CpuRunner(target, weight_format)
    made.choose_threads()
    return made


class CpuRunner:
    """Runs the forwards of a target by compiled kernels."""

    name = "kernels"
    backend = None
    records_cycles = False
    skips_rows = True
    skips_padding = True

    def __init__(self, target: Target, weight_format: WeightFormat = EXACT) -> None:
        _refuse(target)
        self.target = target
        self.weight_format = weight_format
        family, windows = target.family, layer_windows(target)
        layers: Any = family.layers
        self.shape = _sizes(target)
        base: Any = family.base
        self.norm_D, self.eps = base.norm.weight.detach().float(), norm_eps(base.norm)
        head: Any = family.head
        of_head = replace(weight_format, weights="int8") if weight_format.weights == "int4" else weight_format
        with packing_of(target, weight_format) as packing:
            packed = [_layer(layer, window, packing) for layer, window in zip(layers, windows, strict=True)]
            self.output = packing(packing.rows(head), head.bias, of_head)
        self.layers = Layers(self.shape, packed)
        self._rotary: nn.Module = base.rotary_emb
        self._cosine = self._sine = floats(0, self.shape.head_dim)
        self.thread_chooser = Threads(torch.get_num_threads())
        self.ops: Ops = CpuOps(self.current_threads, head, self.output)

    @property
    def build(self) -> str:
        """The compiled library, by its name; measured seconds of another one are not these."""
        return kernels.build_name()

    @property
    def threads(self) -> int | None:
        """The number of threads of a pass while no other process takes the cores."""
        return self.thread_chooser.max_threads

    @property
    def current_threads(self) -> ThreadCount:
        """The number of threads at the moment, for kernels outside of the forward."""
        return lambda: self.thread_chooser.now(time.perf_counter())

    @torch.inference_mode()
    def choose_threads(self) -> None:
        """Time small passes with several numbers of threads and keep the fastest: fewer than
        torch's while the cores are busy."""
        most, session = torch.get_num_threads(), self.target.run_with(self).open(1)
        counts = sorted({1, most, *(2**i for i in range(1, most.bit_length()) if 2**i < most)})
        took: dict[int, list[float]] = {count: [] for count in counts}
        tokens_1N, tree = torch.zeros(1, 4, dtype=torch.long, device="cpu"), Tree.chain(1, 4)
        first = time.perf_counter()
        for turn in range(TURNS):
            if turn > 1 and time.perf_counter() - first > TIMING_SECONDS:
                break
            for count in counts:
                self.thread_chooser = Threads(count)
                began = time.perf_counter()
                session.forward(tokens_1N, tree)
                if turn:  # the first is the warm-up
                    took[count].append(time.perf_counter() - began)
        self.thread_chooser = Threads(min(counts, key=lambda count: sum(took[count])), most)
        self.layers.threads = self.thread_chooser.max_threads

    @property
    def bytes(self) -> int:
        """Bytes of weights that a pass reads."""
        return self.layers.bytes + self.output.bytes

    def __call__(self, inputs: ForwardInput) -> TargetOutput:
        began, (R, Q) = time.perf_counter(), inputs.tokens_RQ.shape
        self.layers.threads = self.thread_chooser.next(began)
        output = self._run(inputs)
        tokens = sum(inputs.counts) or R * Q
        self.thread_chooser.learn((tokens, inputs.width // 512), began, time.perf_counter())
        return output

    def _run(self, inputs: ForwardInput) -> TargetOutput:
        R, Q = inputs.tokens_RQ.shape
        if 0 < sum(inputs.counts) < R * Q:
            return self._run_unpadded(inputs)
        outputs = self._run_tokens(inputs, inputs.tokens_RQ)
        return TargetOutput(*(x_MX.view(R, len(x_MX) // R, x_MX.shape[1]) for x_MX in outputs))

    def _run_unpadded(self, inputs: ForwardInput) -> TargetOutput:
        """Run a forward without the padding after `inputs.counts`."""
        R, Q = inputs.tokens_RQ.shape
        places = [r * Q + q for r, count in enumerate(inputs.counts) for q in range(count)]
        index_M = torch.tensor(places, device=inputs.tokens_RQ.device)

        def spread(x_MX: Tensor) -> Tensor:
            spread_MX = x_MX.new_empty(R * Q, x_MX.shape[1]).index_copy_(0, index_M, x_MX)
            return spread_MX.view(R, Q, x_MX.shape[1])

        return TargetOutput(*map(spread, self._run_tokens(inputs, inputs.tokens_RQ.flatten()[index_M])))

    def _run_tokens(self, inputs: ForwardInput, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [M, V] (with `last_only` [R, V]) and features [M, F] of these tokens, all that the pass
        has."""
        target, D, M = self.target, self.shape.hidden, tokens.numel()
        x_MD = target.embed(tokens).reshape(M, D)  # a new tensor, which the kernels overwrite
        features_MF = floats(M, D * len(inputs.feature_layers))
        inner = sorted({k for k in inputs.feature_layers if k < target.num_layers})
        in_order = list(inputs.feature_layers) == inner or list(inputs.feature_layers) == [*inner, target.num_layers]
        taps_MF = features_MF if in_order else floats(M, D * len(inner))
        self.layers(x_MD, self._attention_pass(inputs), inner, taps_MF)
        last_MD = (
            features_MF[:, D * len(inner) :]
            if in_order and target.num_layers in inputs.feature_layers
            else floats(M, D)
        )
        logits_MV = self._logits(x_MD, last_MD, len(inputs.tokens_RQ) if inputs.last_only else None)
        if not in_order:
            parts = {k: taps_MF[:, i * D : (i + 1) * D] for i, k in enumerate(inner)} | {target.num_layers: last_MD}
            features_MF = torch.cat([parts[k] for k in inputs.feature_layers], dim=1)
        return logits_MV, features_MF

    def wrap_cycle(self, cycle: CycleRunner) -> CycleRunner:
        return cycle

    def wrap_draft_model(self, other: Target, draft_weights: str) -> Target:
        try:
            made = CpuRunner(other, kernels.draft_format(draft_weights))
        except UnsuitedError:
            return other
        made.thread_chooser = self.thread_chooser
        return other.run_with(made)

    def head(self, target: Target, hidden: Tensor) -> Tensor:
        return kernels.linear(self.output, hidden.float(), self.layers.threads)

    def _logits(self, x_MD: Tensor, last_MD: Tensor, last_of: int | None) -> Tensor:
        """Return logits [M, V], or [R, V] of the last token of each of R = `last_of` rows; write the hidden states after
        the final norm to `last_MD`."""
        if last_of is None:
            logits_MV = kernels.head(x_MD, self.norm_D, self.eps, self.output, last_MD, self.layers.threads)
            assert logits_MV is not None
            return logits_MV
        kernels.head(x_MD, self.norm_D, self.eps, None, last_MD, self.layers.threads)
        return kernels.linear(self.output, last_MD.view(last_of, -1, last_MD.shape[1])[:, -1], self.layers.threads)

    def _attention_pass(self, inputs: ForwardInput) -> Pass:
        cosine, sine = self.tables(inputs.width)
        visible_RQT = near_RQT = inputs.visible_RQT.contiguous()
        if (window := self.target.family.window) is not None:
            distance_RQT = inputs.depth_RT[:, -visible_RQT.shape[1] :, None] - inputs.depth_RT[:, None]
            near_RQT = (visible_RQT & (distance_RQT < window)).contiguous()
        return Pass(
            inputs.length_R.contiguous(), inputs.position_RQ.contiguous(), visible_RQT, near_RQT, cosine, sine,
            inputs.cache.tensor, inputs.rows, inputs.counts if sum(inputs.counts) < inputs.tokens_RQ.numel() else (),
        )  # fmt: skip

    def tables(self, positions: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [P, h] of at least this many positions, by the model's own rotary module."""
        if positions > len(self._cosine):
            count = max(positions, min(self.target.context, max(2 * len(self._cosine), 256)))
            cosine, sine = self._rotary(floats(1, 1, 1), torch.arange(count, device="cpu")[None])
            self._cosine, self._sine = cosine[0].float().contiguous(), sine[0].float().contiguous()
        return self._cosine, self._sine

    def check(self) -> None:
        """Compare logits and features over a prompt and a small tree with the model's own forward; raise UnsuitedError
        if they differ."""
        for own, ours in output_pairs(self.target, self):
            if not bool((own - ours).abs().max() <= TOLERANCE * own.abs().max()):  # NaN is not
                raise UnsuitedError(
                    f"the model's own forward gives other numbers (by {float((own - ours).abs().max()):.2g})"
                )


def _check_weight_format(weight_format: WeightFormat, exact: CpuRunner | None) -> None:
    """Raise UnsuitedError if this machine lacks the instructions that a format needs, OptionError if its
    activations would change nothing, as weights are kept otherwise. `exact`: the runner with exact
    weights, if the format keeps these."""
    bfloat16_activations = weight_format.activations == "bfloat16"
    if (
        not bfloat16_activations
        and (weight_format.weights == "int4" or weight_format.activations != "exact")
        and not kernels.has_dots()
    ):
        raise UnsuitedError("the kernels have no integer dot products for this CPU (they need AVX2, or ARM's dotprod)")
    if bfloat16_activations and not kernels.has_avx512_bf16():
        raise UnsuitedError("this CPU has no bfloat16 dot-product instructions (AVX-512 BF16)")
    if weight_format.activations == "exact":
        return
    kinds: list[str] = [weight_format.weights]
    if exact is not None and weight_format.weights == "exact":
        layers = exact.layers.layers
        matrices = [exact.output, *(m for layer in layers for m in layer.matrices)]
        kinds = [_rounded_kind(m.kind) for m in matrices]
    suited = ("bfloat16",) if bfloat16_activations else ("int8", "int4")
    if other := next((kind for kind in kinds if kind not in suited), None):
        instead = {
            "bfloat16": ", or activations bfloat16",
            "int8": ", or activations int8",
            "int4": ", or activations int8",
        }.get(other, "")
        raise OptionError(
            f"activations {weight_format.activations} are for weights kept as {' or '.join(suited)}, and these are kept as {other}: "
            f"take weights {suited[0]}{instead}"
        )


def _rounded_kind(kind: str) -> str:
    """Return how users call a kind of matrix."""
    if kind.startswith(("nibbles", "codes")):
        return "int4"
    return "int8" if kind.startswith(("int8", "bytes")) else kind


def _refuse(target: Target) -> None:
    """Raise UnsuitedError if the model needs something that the kernels do not compute."""
    config, family = target.model.config, target.family
    if target.device.type != "cpu" or target.dtype != torch.float32:
        raise UnsuitedError(f"the kernels work on a CPU in float32, this is {target.dtype} on {target.device}")
    if family.model_type not in FAMILIES:
        raise UnsuitedError(f"the kernels do not know the family {family.model_type}; known: {', '.join(FAMILIES)}")
    if reason := target.own_forward_only("kernels"):
        raise UnsuitedError(reason)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") not in ROPES or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsuitedError(f"the kernels do not know its rotary positions ({rope.get('rope_type')})")
    if getattr(config, "hidden_act", "silu") != "silu" or family.softcap is not None or family.logit_scale != 1.0:
        raise UnsuitedError("the kernels know silu, and no softcap or scale of logits")
    for k, layer in enumerate(family.layers):  # self-speculation leaves parts of layers out
        if not hasattr(layer.self_attn, "q_proj") or not hasattr(layer.mlp, "gate_proj"):
            raise UnsuitedError(f"the kernels run whole layers, and layer {k} has no attention or no MLP")
    size, base = _sizes(target), family.base
    if size.head_dim not in HEAD_DIMS:
        raise UnsuitedError(
            f"the kernels do not know heads of width {size.head_dim}; known: {', '.join(map(str, HEAD_DIMS))}"
        )
    cached = [sizes for sizes in target.layout if sizes is not None]  # None: a layer that is left out
    if size.hidden % 32 or cached != [(size.kv_heads, size.head_dim, size.head_dim)] * target.num_layers:
        raise UnsuitedError("the kernels need widths that are multiples of 32, and keys of one size in every layer")
    for k, layer in enumerate(family.layers):
        if fault := _fault(layer, size):
            raise UnsuitedError(f"the kernels run equal layers, and layer {k} is pruned or edited: {fault}")
    if fault := _weight_fault(family.head, (target.vocab_size, size.hidden)) or _weight_fault(
        base.norm, (size.hidden,)
    ):
        raise UnsuitedError(f"the kernels know a linear lm_head after an RMS norm: {fault}")


def _sizes(target: Target) -> LayerSizes:
    """Return the sizes of the decoder layers: of the first of them, but for the width of the widest MLP."""
    layers: Any = target.family.layers
    first, head_dim = layers[0].self_attn, int(layers[0].self_attn.head_dim)
    return LayerSizes(
        target.hidden_size, _outputs(first.q_proj) // head_dim, _outputs(first.k_proj) // head_dim, head_dim,
        max(_outputs(layer.mlp.gate_proj) for layer in layers), norm_eps(layers[0].input_layernorm), float(first.scaling),
    )  # fmt: skip


def _outputs(linear: Any) -> int:
    return int(getattr(linear, "out_features", 0))


def _fault(layer: Any, size: LayerSizes) -> str:
    """Return which part of a layer has other sizes or settings, or another kind of module; "" for none. The kernels would
    read past its weights."""
    attention, mlp, D, h = layer.self_attn, layer.mlp, size.hidden, size.head_dim
    inner = _outputs(mlp.gate_proj)
    three, gated = (attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)
    queries, keys = size.heads * h, size.kv_heads * h
    shapes = [(queries, D), (keys, D), (keys, D), (inner, D), (inner, D), (D, queries), (D, inner)]
    faults = list(map(_weight_fault, (*three, *gated, attention.o_proj, mlp.down_proj), shapes))
    norms = [getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)]
    faults += [_weight_fault(norm, (h,), size.eps) for norm in norms]
    faults += [_weight_fault(norm, (D,), size.eps) for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
    if any(len({module.bias is None for module in group}) > 1 for group in (three, gated)):
        faults.append("some of its matrices have biases, and some none")
    if (attention.head_dim, attention.scaling) != (h, size.scale):
        faults.append("its heads have another width or scale")
    return next(filter(None, faults), f"its MLP has {inner} inner units, no multiple of 32" if inner % 32 else "")


def _weight_fault(module: Any, shape: tuple[int, ...], eps: float | None = None) -> str:
    """Return the description of a linear layer or a norm if it does not have this shape (and epsilon)."""
    if isinstance(module, StoredLinear):
        return "" if module.stored_rows.shape == shape else one_line(module, 120)
    weight = getattr(module, "weight", None)
    kind = isinstance(module, nn.Linear) or len(shape) == 1
    fits = isinstance(weight, Tensor) and weight.dtype == torch.float32 and weight.shape == shape
    return "" if kind and fits and eps in (None, norm_eps(module)) else one_line(module, 120)


def _layer(layer: Any, window: int, pack: Packing) -> kernels.Layer:
    attention, mlp = layer.self_attn, layer.mlp
    qkv, k, v = _queries_keys_values((attention.q_proj, attention.k_proj, attention.v_proj), pack)
    return kernels.Layer(
        qkv=qkv,
        o=pack(pack.rows(attention.o_proj), attention.o_proj.bias),
        gate_up=pack.gated(mlp.gate_proj, mlp.up_proj),
        down=pack(pack.rows(mlp.down_proj), mlp.down_proj.bias),
        norm=_norm(layer.input_layernorm),
        mlp_norm=_norm(layer.post_attention_layernorm),
        q_norm=_norm(attention.q_norm) if hasattr(attention, "q_norm") else None,
        k_norm=_norm(attention.k_norm) if hasattr(attention, "k_norm") else None,
        window=window,
        k=k,
        v=v,
    )


def _queries_keys_values(
    three: tuple[Any, Any, Any], pack: Packing
) -> tuple[kernels.Matrix, kernels.Matrix | None, kernels.Matrix | None]:
    """Return one matrix, and keys and values apart where a file has them in other types."""

    def bias_of(modules: Sequence[Any]) -> Tensor | None:
        return None if modules[0].bias is None else torch.cat([module.bias for module in modules])

    rows = [pack.rows(module) for module in three]
    if any(len(part) % kernels.panel() for part in rows[:2]):  # they would begin within a panel
        rows = [part if kernels.joined(rows) else kernels.Rows.of(part.read()) for part in rows]
    if (joined := kernels.joined(rows)) is not None:
        return pack(joined, bias_of(three)), None, None
    if (joined := kernels.joined(rows[:2])) is not None:
        return pack(joined, bias_of(three[:2])), None, pack(rows[2], three[2].bias)
    queries, keys, values = (pack(part, module.bias) for part, module in zip(rows, three, strict=True))
    return queries, keys, values


def _norm(module: Any) -> Tensor:
    weight: Tensor = module.weight
    return weight.detach().float().contiguous()
