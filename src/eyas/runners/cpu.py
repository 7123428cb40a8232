"""Runs a target's forwards on a CPU by compiled kernels.

The kernels know the decoder layers of the families in _decoders.py. A new runner's logits and features over a
prompt and a small tree are compared with the model's own forward, once for each model and machine (_proofs.py).
If they differ, the runner is refused. The model is not changed: the kernels keep a copy of its weights, without
loss in the narrowest format that holds them, or rounded on request (`WeightFormat`).

A token's logits do not depend, to the last bit, on the other tokens of the pass. So a tree's logits
equal plain decoding's exactly, not only up to rounding.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from eyas import kernels
from eyas.core.cycle import CycleRunner
from eyas.core.ops import Ops
from eyas.core.target import ForwardInput, Target
from eyas.core.tree import TargetOutput, Tree
from eyas.errors import OptionError
from eyas.kernels import EXACT, Layers, Pass, ThreadCount, WeightFormat, floats
from eyas.runners._comparison import UnsuitedError, output_pairs
from eyas.runners._decoders import angles, final_norm, packed_layers, refuse, sizes_of, token_inputs
from eyas.runners._packing import check_fit, packing_of
from eyas.runners._proofs import Proof
from eyas.runners._states import KernelStates
from eyas.runners._threads import Threads
from eyas.runners.cpu_ops import CpuOps
from eyas.runners.stored import stored_in

__all__ = ["CpuRunner", "UnsuitedError", "make_cpu_runner"]

CHECKED_LAYERS = 2  # at least, of a model whose weights stay in their file, whose own forward is slow
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
    refuse(target)  # before its weights are read
    if stored_in(target.model) is not None:
        check_fit(target, weight_format)
    proof = Proof(target) if own else None
    known = proof is not None and proof.known
    made, checkpoint = None, stored_in(target.model)
    if checkpoint is not None and not known:
        # the layers up to the last one that is the first of its kind
        last = max(target.layout.index(sizes) for sizes in target.layout if sizes is not None)
        few = Target(checkpoint.model(min(max(CHECKED_LAYERS, last + 1), target.num_layers)), target.name)
        CpuRunner(few).check()
    if not (known or checkpoint):
        made = CpuRunner(target)
        made.check()
    if proof is not None and not known:
        proof.keep()
    _check_weight_format(weight_format, made)
    of_weights = replace(weight_format, kv="exact")
    if made is None or not of_weights.exact:
        made = None  # its memory is free before others are packed
        made = CpuRunner(target, weight_format)
        _check_weight_format(weight_format, made)
    made.weight_format = weight_format
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
        refuse(target)
        self.target = target
        self.weight_format = weight_format
        self.shape = sizes_of(target)
        self.norm = final_norm(target)
        head: Any = target.family.head
        of_head = replace(weight_format, weights="int8") if weight_format.weights == "int4" else weight_format
        with packing_of(target, weight_format) as packing:
            packed = packed_layers(target, self.shape, packing)
            self.token_inputs = token_inputs(target, packing)
            self.output = packing(packing.rows(head), head.bias, of_head)
        self.layers = Layers(self.shape, packed)
        self._cosine = self._sine = floats(1, 0, self.shape.rotary)
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
        forward = self._attention_pass(inputs)
        if self.token_inputs is not None:
            forward = replace(forward, inputs_MX=self.token_inputs(tokens.flatten(), x_MD, self.layers.threads))
        self.layers(x_MD, forward, inner, taps_MF)
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
        """Return the cycle as it runs: unchanged."""
        return cycle

    def wrap_draft_model(self, other: Target, draft_weights: str) -> Target:
        """Return a small model that runs by the kernels; unchanged if they do not suit it."""
        try:
            made = CpuRunner(other, kernels.draft_format(draft_weights))
        except UnsuitedError:
            return other
        made.thread_chooser = self.thread_chooser
        return other.run_with(made)

    def open_states(self, rows: int) -> KernelStates | None:
        """Return the recurrent state of a new session's rows; None if no layer has any."""
        return KernelStates(self.layers.states, rows) if self.layers.states else None

    def head(self, target: Target, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states, by the packed output matrix."""
        return self._scaled(kernels.linear(self.output, hidden.float(), self.layers.threads))

    def _logits(self, x_MD: Tensor, last_MD: Tensor, last_of: int | None) -> Tensor:
        """Return logits [M, V], or [R, V] of the last token of each of R = `last_of` rows; write the hidden states after
        the final norm to `last_MD`."""
        if last_of is None:
            logits_MV = self.norm(x_MD, self.output, last_MD, self.layers.threads)
            assert logits_MV is not None
            return self._scaled(logits_MV)
        self.norm(x_MD, None, last_MD, self.layers.threads)
        last_RD = last_MD.view(last_of, -1, last_MD.shape[1])[:, -1]
        return self._scaled(kernels.linear(self.output, last_RD, self.layers.threads))

    def _scaled(self, logits: Tensor) -> Tensor:
        """Apply the family's scale and cap of logits, in place."""
        family = self.target.family
        if family.logit_scale != 1.0 or family.softcap is not None:
            kernels.scale_logits(logits, family.logit_scale, family.softcap or 0.0, self.layers.threads)
        return logits

    def _attention_pass(self, inputs: ForwardInput) -> Pass:
        cosine, sine = self.tables(inputs.width)
        visible_RQT = near_RQT = inputs.visible_RQT.contiguous()
        if (window := self.target.family.window) is not None:
            distance_RQT = inputs.depth_RT[:, -visible_RQT.shape[1] :, None] - inputs.depth_RT[:, None]
            near_RQT = (visible_RQT & (distance_RQT < window)).contiguous()
        store, *others = inputs.cache.stores
        return Pass(
            inputs.length_R.contiguous(), inputs.position_RQ.contiguous(), visible_RQT, near_RQT, cosine, sine,
            store, inputs.rows, inputs.counts if sum(inputs.counts) < inputs.tokens_RQ.numel() else (),
            next((state.record for state in inputs.states if isinstance(state, KernelStates)), None), inputs.prompt, others,
        )  # fmt: skip

    def tables(self, positions: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [tables, P, h] of at least this many positions."""
        known = self._cosine.shape[1]
        if positions > known:
            self._cosine, self._sine = angles(
                self.target, max(positions, min(self.target.context, max(2 * known, 256)))
            )
        return self._cosine, self._sine

    def check(self) -> None:
        """Compare logits and features over a prompt and a small tree with the model's own forward; raise UnsuitedError
        if they differ."""
        for own, ours in output_pairs(self.target, self):
            if not bool((own - ours).abs().max() <= TOLERANCE * own.abs().max()):  # NaN is not
                raise UnsuitedError(
                    f"the model's own forward gives other numbers (by {float((own - ours).abs().max()):.2g})"
                )


def _check_weight_format(weight_format: WeightFormat, made: CpuRunner | None) -> None:
    """Raise UnsuitedError if this machine lacks the instructions that a format needs, OptionError if its
    activations would change nothing, as weights are kept otherwise. `made`: a runner, whose weights tell how exact ones
    are kept; None: that is not checked yet."""
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
    if weight_format.weights == "exact":
        if made is None:
            return
        layers = made.layers.layers
        matrices = [made.output, *(m for layer in layers for m in layer.matrices)]
        kinds = [_rounded_kind(m.kind) for m in matrices]
    suited = ("bfloat16",) if bfloat16_activations else ("int8", "int4")
    if other := next((kind for kind in kinds if kind not in suited), None):
        instead = {
            "bfloat16": ", or activations bfloat16",
            "int8": ", or activations int8",
            "int4": ", or activations int8",
        }.get(other, "")
        raise OptionError(
            f"activations {weight_format.activations} are for weights kept as {' or '.join(suited)}, but these are kept as {other}: "
            f"take weights {suited[0]}{instead}"
        )


def _rounded_kind(kind: str) -> str:
    """Return how users call a kind of matrix."""
    if kind.startswith(("nibbles", "codes")):
        return "int4"
    return "int8" if kind.startswith(("int8", "bytes")) else kind
