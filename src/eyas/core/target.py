"""The target: an unmodified causal language model of Hugging Face, run over whole draft trees.

`Target` wraps the model; it holds no state of requests. `TargetSession` holds the KV cache of B rows:

    prefill(row, tokens) -> logits of the last token     forward(tokens_BN, tree) -> TargetOutput     commit(verdict)

and for a target that serves as a draft model:

    extend(tokens_BQ, ...) -> TargetOutput, one level of a tree     advance(count_B)

A `Runner` runs the forwards. `ModelRunner` calls the model's own forward with a 4-D mask,
position_ids and a `KVCache` as past_key_values. The model is not patched, and features are read by
hooks that exist only during the forward. This module knows no method and no sampling.

Letters: B rows, R rows of a forward, N nodes of a tree, T tokens or uncommitted nodes, Q new nodes, the last of
these T, F feature width, D hidden, V vocabulary, W width (slots that a forward attends to).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from eyas.core import families
from eyas.core.cache import KVCache, Layout, additive_mask, layout_of, slot_mask, slot_positions
from eyas.core.extensions import OnChunk, OnLogits, TargetState, known_extensions
from eyas.core.ops import REFERENCE, Backend, Ops
from eyas.core.tree import TargetOutput, Tree, Verdict
from eyas.errors import FitError, InputError, ModelError, OptionError
from eyas.formats import EXACT, WeightFormat

__all__ = ["Adapters", "ForwardInput", "ModelRunner", "Runner", "Target", "TargetSession", "refuse_autocast", "turn_of"]

PREFILL_CHUNK = 512  # tokens of a prompt that go through the model at a time
_turns = WeakKeyDictionary[nn.Module, Any](), threading.RLock()  # locks by model, and the lock to look one up


def turn_of(model: nn.Module) -> AbstractContextManager[Any]:
    """Return the lock that threads take, by turns, to use a model: a forward sets hooks, states and an adapter on modules
    that all targets of the model share. A thread may take it again."""
    locks, looking_up = _turns
    with looking_up:
        return locks.setdefault(model, threading.RLock())  # type: ignore[no-any-return]


def refuse_autocast(device: torch.device) -> None:
    """Raise OptionError under torch.autocast: caches and kernels have the model's dtype, and plain decoding there has
    another text."""
    if torch.is_autocast_enabled(device.type):
        raise OptionError(
            f"torch.autocast is on, but eyas computes in the model's own dtype: "
            f'call eyas outside of it, or under torch.autocast("{device.type}", enabled=False)'
        )


@dataclass(frozen=True)
class ForwardInput:
    """The input of one forward: Q new nodes in each of R rows, in the slots after the committed
    tokens and T - Q earlier nodes."""

    target: Target
    tokens_RQ: Tensor  # int64
    position_RQ: Tensor  # int64
    length_R: Tensor  # int64; number of committed tokens
    depth_RT: Tensor  # int64; depth of all T uncommitted nodes
    visible_RQT: Tensor  # bool; which of the T nodes each new node attends to
    cache: KVCache  # `KVCache.prepare` has been called for this forward
    rows: Sequence[int]  # which rows of the cache the R rows are: a range, unless rows are left out
    width: int  # upper bound of the slots in use
    feature_layers: tuple[int, ...]  # hidden states to return (`Target.tap`)
    last_only: bool  # only the logits of the last node are needed
    prompt: bool = False  # the nodes are a chunk of a prompt; as its length varies, it is not recorded
    counts: tuple[int, ...] = ()  # `Tree.counts` of the R rows; the output of other nodes may hold anything
    states: tuple[TargetState, ...] = ()  # what the session's rows hold beyond keys and values


class Runner(Protocol):
    """A way to run the forwards of a target, and the operations around them.

    Attributes:
        name: "model": the model's own code, "kernels": C++ kernels, "fused": layers by GPU kernels, "graphs",
            "compiled graphs": CUDA graphs of the model's code or of its compiled layers.
        weight_format: weight format of the linear layers; a target with rounded weights counts as a
            different target (its own costs, its own losslessness).
        ops: implementation of the operations of a cycle.
        records_cycles: whether whole cycles are recorded, so that their stages cannot be timed one
            by one.
        skips_rows: whether a forward of some rows leaves out the others, whichever rows these are.
        skips_padding: whether nodes after `ForwardInput.counts` cost nothing.
    """

    name: str
    weight_format: WeightFormat
    ops: Ops
    records_cycles: bool
    skips_rows: bool
    skips_padding: bool

    def __call__(self, inputs: ForwardInput) -> TargetOutput:
        """Run one forward; the keys and values of the new nodes are stored in `inputs.cache`."""
        ...

    @property
    def threads(self) -> int | None:
        """Number of threads that a forward uses; None: torch's number."""
        ...

    @property
    def backend(self) -> Backend | None:
        """The backend of torch.compile for layers of the model and of draft nets; None: nothing is compiled."""
        ...

    def wrap_draft_model(self, other: Target, draft_weights: str) -> Target:
        """Return a draft model with a runner of this kind; unchanged if it does not suit the model."""
        ...

    def head(self, target: Target, hidden: Tensor) -> Tensor:
        """Return the logits [..., V] of final-norm features [..., D]."""
        ...

    def wrap_cycle(self, cycle: Any) -> Any:
        """Return the runner of a decoder's cycles (a `core.cycle.CycleRunner`): `cycle` itself, or one
        that replays recordings of them."""
        ...


class Adapters(Protocol):
    """Adapters (LoRA and the like) that requests choose from, and the one that a view of the target
    uses (`targets.adapters`)."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names by which requests choose an adapter."""

    @property
    def used(self) -> str:
        """The adapter of this view; "": none."""
        ...

    def view(self, name: str) -> Adapters:
        """Return a view with this adapter; "": without one. Raise OptionError for an unknown name."""
        ...

    def switch(self) -> None:
        """Switch the model to this view's adapter."""
        ...


class Target:
    """An unmodified model in eval mode.

    `device` is the main one, where its methods take and return all tensors; an extension may let
    layers compute on others.

    Attributes:
        extensions: its properties beyond layers with keys and values (`core.extensions`).
        adapters: adapters that requests choose from; None: there are none. They are not an extension,
            because they alone act before every use of the model.
        draft_weights: weight format of draft nets for this target, see `Ops.draft_net`: "auto",
            "fp8" or "int4".
        turn: the lock by which threads take turns (`turn_of`).
        layout: sizes that each layer caches.
        head_is_exact: whether `head` reproduces the model's logits.

    Raises:
        ModelError: the model cannot be served; the message names the family and the reason.
    """

    def __init__(self, model: PreTrainedModel, name: str = "") -> None:
        if model.training:
            raise ModelError("the model is in training mode: call model.eval() first")
        refuse_autocast(model.device)
        self.model, self.name = model, name
        self.family = families.describe(model)
        self.device, self.dtype = model.device, model.dtype
        self.runner: Runner = ModelRunner()
        self.turn = turn_of(model)
        self.draft_weights = "auto"
        self.adapters: Adapters | None = None
        self.extensions = tuple(kind(self) for kind in known_extensions() if kind.applies(model))
        self.layout, self.vocab_size, self.head_is_exact = self._probe()

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.family.layers)

    @property
    def num_embeddings(self) -> int:
        """Number of rows of the embedding table."""
        return int(self._table.shape[0])

    @property
    def hidden_size(self) -> int:
        """Numbers of a hidden state, D."""
        return int(self._table.shape[1])

    @property
    def _table(self) -> Any:
        """The table of embeddings, or the rows that stand for one that stays in its file."""
        embedding: Any = self.family.embedding
        return getattr(embedding, "stored_rows", None) or embedding.weight

    @property
    def context(self) -> int:
        """Positions that a request may use, prompt and new tokens together."""
        return self.family.context

    @property
    def adapter(self) -> str:
        """The adapter that this view of the target uses; "": none."""
        return "" if self.adapters is None else self.adapters.used

    def with_adapter(self, name: str) -> Target:
        """Return a view of the target with this adapter; "": without one. The model is shared. Raise OptionError for
        an unknown name."""
        if name == self.adapter:
            return self
        if self.adapters is None:
            raise OptionError(
                f"there is no adapter {name!r}: give eyas.load adapters by name: adapter={{name: folder}}"
            )
        other = copy(self)
        other.adapters = self.adapters.view(name)
        return other

    def _use_adapter(self) -> None:
        """Switch the model to this view's adapter."""
        if self.adapters is not None:
            self.adapters.switch()

    def _probe(self) -> tuple[Layout, int, bool]:
        """Run the model on a few tokens. Return (sizes that each layer caches, V, whether `head` reproduces its logits)."""
        ids = torch.zeros(1, 2, dtype=torch.long, device=self.device)
        if count := max((extension.probe_tokens for extension in self.extensions), default=0):
            ids = torch.arange(count, device=self.device)[None].clamp(max=self.num_embeddings - 1)
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            features = stack.enter_context(self.tap((self.num_layers,)))
            caches = [stack.enter_context(extension.probing()) for extension in self.extensions]
            cache = next((one for one in caches if one is not None), None)
            if cache is None and self.family.has_states:
                raise ModelError(
                    f"a model of type {self.family.model_type} cannot be served: it has recurrent state, but no target extension "
                    "keeps it"
                )
            cache = DynamicCache() if cache is None else cache
            logits = self.model(input_ids=ids, use_cache=True, **{self.family.cache_argument: cache}).logits
        layout, keys = layout_of(cache), [getattr(layer, "keys", None) for layer in cache.layers]
        if twice := [
            n for n, keys_BHTh in enumerate(keys) if keys_BHTh is not None and keys_BHTh.shape[2] > ids.shape[1]
        ]:
            raise ModelError(
                f"the model cannot be served: several of its layers write into layer {twice[0]} of the cache: give each layer a number "
                "of its own (layer_idx of its attention)"
            )
        for extension in self.extensions:
            extension.read_probe(cache)
        head_logits = self.head(features())
        exact = head_logits.shape == logits.shape and torch.allclose(
            head_logits.float(), logits.float(), rtol=1e-2, atol=1e-3
        )
        return layout, logits.shape[-1], bool(exact)

    def embed(self, ids: Tensor) -> Tensor:
        """Return the input of the first layer [..., D] for ids [...], without learned position embeddings."""
        with self.turn:
            self._use_adapter()
            return families.embed(self.family, ids)

    def head(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., V] of final-norm features [..., D], with the family's softcap and scales."""
        with self.turn:
            self._use_adapter()
            return self.runner.head(self, hidden)

    @contextmanager
    def tap(self, feature_layers: Sequence[int]) -> Iterator[Callable[[], Tensor]]:
        """Record features of the model's forwards within this context. Yield a function that returns the last
        forward's.

        Args:
            feature_layers: the features to concatenate: k = Hugging Face's hidden_states[k], the
                input of layer k; L (the number of layers) = after the final norm.
        """
        caught: dict[int, Tensor] = {}
        L, thread = self.num_layers, threading.get_ident()  # forwards of the user's in other threads are not ours

        def before(k: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if threading.get_ident() == thread:
                caught[k] = args[0] if args else kwargs["hidden_states"]

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if threading.get_ident() == thread:
                caught[L] = output[0]

        def features() -> Tensor:
            if any(caught[k].ndim != 3 for k in feature_layers):
                raise ModelError(
                    f"the layers of a {self.family.model_type} pass on several streams of hidden states, so its inner features "
                    "cannot be read. Use a method that reads the last hidden states or none, like eagle1 or suffix"
                )
            here = [caught[k].to(self.device) for k in feature_layers]
            return torch.cat(here, dim=-1) if here else torch.empty(1, 0, 0, dtype=self.dtype, device=self.device)

        with self.turn, ExitStack() as hooks:
            self._use_adapter()
            whole = (self.model, self.family.base)
            compiled = any(module._compiled_call_impl is not None for module in (*whole, *self.family.layers))
            if feature_layers and (compiled or any("forward" in vars(module) for module in whole)):
                # torch.compile does not notice hooks that come after it
                hooks.enter_context(torch.compiler.set_stance("force_eager"))
            for k in feature_layers:
                if not 0 <= k <= L:
                    raise OptionError(f"feature layer {k} does not exist: the target has {L} layers (0..{L})")
                if k < L:
                    hook = self.family.layers[k].register_forward_pre_hook(partial(before, k), with_kwargs=True)
                else:
                    hook = self.family.base.register_forward_hook(after)
                hooks.callback(hook.remove)
            yield features

    @torch.no_grad()
    def encode(self, tokens_RT: Tensor, feature_layers: Sequence[int]) -> Tensor:
        """Return the features [R, T, F] of whole sequences, without a cache and without logits. Sequences may be
        padded on the right."""
        with self.tap(feature_layers) as features:
            self.family.base(input_ids=tokens_RT, use_cache=False)
            return features()

    @torch.no_grad()
    def first_bad_layer(self, ids: Sequence[int]) -> str:
        """Return where NaN first appears in a forward over these ids, in words for an error message."""
        inner = [f"after layer {k}" for k in range(self.num_layers - 1)]
        places = ["in the embeddings", *inner, "in the last layer or the final norm"]
        bad = [False] * len(places)

        def look(k: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            bad[k] = bool(torch.isnan(args[0] if args else kwargs["hidden_states"]).any())

        with self.turn, ExitStack() as hooks:
            self._use_adapter()
            for k, layer in enumerate(self.family.layers):
                hooks.callback(layer.register_forward_pre_hook(partial(look, k), with_kwargs=True).remove)
            last = self.family.base(input_ids=torch.tensor([list(ids)], device=self.device), use_cache=False)[0]
        bad[-1] = bool(torch.isnan(last).any())
        return places[bad.index(True)] if any(bad) else "in the lm_head"

    def nan_error(self, ids: Sequence[int]) -> ModelError:
        """Return the error for NaN logits after these ids; its message says where NaN appears first."""
        where = self.first_bad_layer(ids)
        return ModelError(
            f"the target's logits are NaN ({where}): its weights or dtype ({self.dtype}) are broken; try --dtype float32"
        )

    def own_forward_only(self, runner: str) -> str:
        """Return why this kind of runner cannot serve the target (`TargetExtension.own_forward_only`);
        "": it can."""
        reasons = (extension.own_forward_only.get(runner, "") for extension in self.extensions)
        return next(filter(None, reasons), "")

    def check_media(self, media: Mapping[str, Any], tokens: Sequence[int]) -> None:
        """Check a prompt's further inputs (`Request.media`). Raise InputError or ModelError if they
        cannot be read."""
        if not any([extension.check_media(self, media, tokens) for extension in self.extensions]):
            raise InputError(f"{', '.join(media)}: no target extension reads more than tokens; give text alone")

    def run_with(self, runner: Runner) -> Target:
        """Return a copy of the target whose forwards are run by `runner`; the model is shared."""
        other = copy(self)
        other.runner = runner
        return other

    def open(self, rows: int, feature_layers: Sequence[int] = ()) -> TargetSession:
        """Return a session with an empty cache for `rows` sequences, which keeps the hidden states of
        `feature_layers`."""
        return TargetSession(self, rows, tuple(feature_layers))


class TargetSession:
    """The KV cache of B rows, and how many tokens of each row are committed. Rows are filled,
    advanced and emptied independently.

    Attributes:
        rows: B, a number. In arguments of the methods, `rows` are indices of rows.
    """

    def __init__(self, target: Target, rows: int, feature_layers: tuple[int, ...]) -> None:
        self.target, self.rows, self.feature_layers = target, rows, feature_layers
        dtype = getattr(torch, target.runner.weight_format.kv, target.dtype)  # of "exact" there is none
        self.cache = KVCache(target.layout, rows, dtype, target.device, target.runner.ops.commit)
        self.length_B = torch.zeros(rows, dtype=torch.long, device=target.device)
        self.lengths = [0] * rows  # the host's copy of `length_B`; stale between `commit` and `set_host_lengths`
        opened = [extension.open(self) for extension in target.extensions]
        # what rows hold beyond keys and values; () for most targets
        self.states: tuple[TargetState, ...] = tuple(state for state in opened if state is not None)

    def reserve(self, tokens: int) -> None:
        """Allocate slots for `tokens` tokens per row, before a request starts. Raise FitError, with the bytes, if
        memory is too small."""
        try:
            self.cache.reserve(tokens)
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            need = self.cache.bytes_by_device(tokens)
            gib = " and ".join(
                f"{size / 2**30:.1f} GiB" + (f" on {device}" if len(need) > 1 else "") for device, size in need.items()
            )
            raise FitError(
                f"keys and values of {self.rows} rows x {tokens} tokens need {gib}, which do not fit: use fewer or shorter"
            ) from error

    def check_fit(self, prompt: int, new: int) -> None:
        """Raise FitError, with the numbers, if prompt and new tokens exceed the context."""
        context, reason = self.target.context, self.target.family.context_reason
        why = f" ({reason})" if reason else ""
        if prompt >= context:
            raise FitError(
                f"the prompt has {prompt} tokens, the target's context is {context}{why}: shorten the prompt"
            )
        if prompt + new > context:
            raise FitError(
                f"{prompt} prompt tokens + {new} new tokens = {prompt + new} exceed the target's context of {context}{why}: "
                f"ask for at most {context - prompt} new tokens"
            )

    @torch.inference_mode()
    def prefill(
        self, row: int, tokens: Sequence[int], on_chunk: OnChunk | None = None, on_logits: OnLogits | None = None,
        media: Mapping[str, Any] | None = None,
    ) -> Tensor:  # fmt: skip
        """Append tokens to a row, in chunks that bound the memory; returns the logits [V] of the last token.

        Args:
            on_logits: called with all logits [T, V] of each chunk and the position of its first
                token.
            media: see `Request.media`. The tokens are then a whole prompt, and the row must be
                empty.
        """
        assert tokens, "at least one token"
        if media:
            assert self.lengths[row] == 0, "a prompt with media is read whole"
            readings = (one.read_media(self, row, tokens, media, on_chunk, on_logits) for one in self.target.extensions)
            return next(logits_V for logits_V in readings if logits_V is not None)
        logits_V = None
        start = 0
        while start < len(tokens):
            chunk_1T = torch.tensor([tokens[start : start + self._chunk(row)]], device=self.target.device)
            T, begin = chunk_1T.shape[1], self.lengths[row]
            start += T
            order_1T = torch.arange(T, device=self.target.device)[None]
            causal_1TT = (order_1T[0, :, None] >= order_1T)[None]
            output = self._run(
                range(row, row + 1), chunk_1T, order_1T, causal_1TT, begin + T, prompt=True, last_only=on_logits is None
            )
            self.length_B[row] += T
            self.lengths[row] += T
            if on_chunk is not None:
                on_chunk(chunk_1T[0], output.features_BNF[0], begin)
            if on_logits is not None:
                on_logits(output.logits_BNV[0], begin)
            logits_V = output.logits_BNV[0, -1]
        for state in self.states:
            state.prompt_read(row, self.lengths[row])
        assert logits_V is not None
        return logits_V

    def _chunk(self, row: int) -> int:
        """Return the most tokens of a prompt that go through the model at a time."""
        limits = (state.max_chunk(row, self.lengths[row]) for state in self.states)
        return next((limit for limit in limits if limit is not None), PREFILL_CHUNK)

    @torch.inference_mode()
    def forward(self, tokens_BN: Tensor, tree: Tree, rows: Sequence[int] = ()) -> TargetOutput:
        """Run the model over the trees of all rows. Nothing is committed.

        `rows`: indices of the rows whose output is wanted; the others' output may be zero. (): all.
        """
        # slots that forward or commit write to: commit moves paths of max_depth + 1 nodes
        reach = max(tree.nodes, tree.max_depth + 1)
        return self._run_some(rows, tokens_BN, tree.depth_BN, tree.mask_BNN, max(self.lengths) + reach, tree.counts)

    @torch.inference_mode()
    def extend(
        self, tokens_BQ: Tensor, depth_BT: Tensor, visible_BQT: Tensor, rows: Sequence[int] = ()
    ) -> TargetOutput:
        """Run the model over Q new nodes, in the slots after the T - Q uncommitted nodes of earlier calls. Nothing is
        committed.

        Args:
            depth_BT: int64, depth of all T nodes; depth 0 is the position after the committed tokens.
            visible_BQT: bool; which of the T nodes each new node attends to.
            rows: as for `forward`.
        """
        return self._run_some(rows, tokens_BQ, depth_BT, visible_BQT, max(self.lengths) + depth_BT.shape[1])

    def _run_some(
        self, rows: Sequence[int], tokens_BQ: Tensor, depth_BT: Tensor, visible_BQT: Tensor, width: int,
        counts: tuple[int, ...] = (),
    ) -> TargetOutput:  # fmt: skip
        """Run the model over some rows, if the runner can leave the others out, whose output is then zero; else over
        all rows."""
        if not self.target.runner.skips_rows or len(rows) in (0, self.rows):
            return self._run(range(self.rows), tokens_BQ, depth_BT, visible_BQT, width, counts=counts)
        row_R = torch.tensor(rows, device=self.target.device)
        counts = tuple(counts[row] for row in rows) if counts else ()
        output = self._run(rows, tokens_BQ[row_R], depth_BT[row_R], visible_BQT[row_R], width, counts=counts)

        def spread(x_RQX: Tensor) -> Tensor:
            return x_RQX.new_zeros(self.rows, *x_RQX.shape[1:]).index_copy_(0, row_R, x_RQX)

        return TargetOutput(spread(output.logits_BNV), spread(output.features_BNF))

    def _run(
        self, rows: Sequence[int], tokens_RQ: Tensor, depth_RT: Tensor, visible_RQT: Tensor, width: int, last_only: bool = False,
        prompt: bool = False, counts: tuple[int, ...] = (),
    ) -> TargetOutput:  # fmt: skip
        target, Q, T = self.target, tokens_RQ.shape[1], depth_RT.shape[1]
        length_R = self.length_B[rows.start : rows.stop] if isinstance(rows, range) else self.length_B[list(rows)]
        self.cache.prepare(rows, lambda: length_R[:, None] + torch.arange(T - Q, T, device=target.device), width)
        position_RQ = length_R[:, None] + depth_RT[:, T - Q :]
        for state in self.states:
            position_RQ = state.positions(position_RQ, rows)
        # nodes past the context are never emitted, but the model needs a valid position for them
        if width > target.context:
            position_RQ = position_RQ.clamp(max=target.context - 1)
        inputs = ForwardInput(
            target, tokens_RQ, position_RQ, length_R, depth_RT, visible_RQT, self.cache, rows, self.cache.width, self.feature_layers,
            last_only, prompt, counts, self.states,
        )  # fmt: skip
        with target.turn, ExitStack() as stack:
            for state in self.states:
                stack.enter_context(state.reading(inputs, self.length_B, fresh=self.lengths[rows[0]] == 0))
            return target.runner(inputs)

    @torch.inference_mode()
    def commit(self, verdict: Verdict, active_B: Tensor) -> None:
        """Commit the accepted nodes of the active rows; the slots of other nodes are free again."""
        self.cache.commit(self.length_B, verdict.path_BP)
        for state in self.states:
            state.commit(self.length_B, verdict.path_BP, verdict.length_B, active_B)
        self.length_B = torch.addcmul(self.length_B, verdict.length_B, active_B)

    @torch.inference_mode()
    def advance(self, count_B: Tensor, max_lengths: Sequence[int]) -> None:
        """Commit the first `count_B` nodes of each row. They must be a chain: its nodes are in
        consecutive slots already.

        `max_lengths`: upper bounds of the new lengths, known to the host.
        """
        for state in self.states:
            state.advance(self.length_B, count_B)
        self.length_B = self.length_B + count_B
        self.lengths = list(max_lengths)

    def set_host_lengths(self, lengths: Sequence[int]) -> None:
        """Set the host's copy of the lengths, which it reads after each cycle."""
        self.lengths = list(lengths)

    def longest_known_prefix(self, row: int, max_length: int) -> int:
        """Return the most tokens, up to `max_length`, to which `truncate` can cut a row, and which `copy` can
        copy. Fewer only if the target has states."""
        max_length = min(max_length, self.lengths[row])
        for state in self.states:
            max_length = state.longest_known_prefix(row, self.length_B, max_length)
        return max_length

    def truncate(self, row: int, length: int) -> None:
        """Cut a row back to its first `length` tokens, a number that `longest_known_prefix` has returned."""
        assert length <= self.lengths[row]
        for state in self.states:
            state.truncate(row, length, self.length_B)
        self.length_B[row] = self.lengths[row] = length

    @torch.inference_mode()
    def copy(self, source: int, row: int, length: int) -> None:
        """Replace a row's text by the first `length` tokens of another row's, a number that
        `longest_known_prefix` has returned."""
        assert length <= self.lengths[source]
        for state in self.states:
            state.copy(source, row, length, self.length_B)
        self.cache.copy(source, row, length)
        self.length_B[row] = self.lengths[row] = length

    def clear(self, row: int) -> None:
        """Empty a row whose keys and values may be NaN."""
        self.truncate(row, 0)
        self.cache.clear(row)
        for state in self.states:
            state.clear(row)


class ModelRunner:
    """Runs the model's own forward, with a 4-D mask and a `KVCache`."""

    name, weight_format = "model", EXACT
    threads: int | None = None
    backend = None
    records_cycles, skips_rows, skips_padding = False, True, False

    def __init__(self, ops: Ops = REFERENCE) -> None:
        self.ops = ops

    def __call__(self, inputs: ForwardInput) -> TargetOutput:
        target = inputs.target
        extra: dict[str, Any] = {}
        # With logits_to_keep as a number, layers that share keys (Gemma 4) compute the last token
        # only, but drafts read the features of all; as a tensor it must be on the LM head's device.
        if inputs.last_only and target.family.takes_logits_to_keep:
            last = inputs.tokens_RQ.shape[1] - 1
            extra["logits_to_keep"] = torch.tensor([last], device=target.device) if target.family.shares_keys else 1
        with target.tap(inputs.feature_layers) as features:
            if target.family.has_attention:
                extra |= {"attention_mask": _masks(inputs), "position_ids": inputs.position_RQ}
            extra[target.family.cache_argument] = inputs.cache
            logits_RQV = target.model(input_ids=inputs.tokens_RQ, use_cache=True, **extra).logits
            features_RQF = features() if inputs.feature_layers else logits_RQV[..., :0]
        return TargetOutput(logits_RQV, features_RQF)

    def wrap_draft_model(self, other: Target, draft_weights: str) -> Target:
        """Return a small model as it drafts: unchanged."""
        return other

    def wrap_cycle(self, cycle: Any) -> Any:
        """Return the cycle as it runs: unchanged."""
        return cycle

    def head(self, target: Target, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states, by the model's own output matrix."""
        return families.head(target.family, hidden)


def _masks(inputs: ForwardInput) -> Tensor | dict[str, Tensor]:
    """Return additive float masks, which all attention backends that support a 4-D mask accept. Sliding windows count
    positions, not slots."""
    family, length_R, visible_RQT, width = inputs.target.family, inputs.length_R, inputs.visible_RQT, inputs.width
    allowed_RQW = slot_mask(length_R, visible_RQT, width)

    def additive(allowed: Tensor) -> Tensor:
        return additive_mask(allowed, inputs.target.dtype)[:, None]

    def near(apart: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        new_RQ1 = (length_R[:, None] + inputs.depth_RT[:, -visible_RQT.shape[1] :])[..., None]
        return additive(allowed_RQW & apart(new_RQ1, slot_positions(length_R, inputs.depth_RT, width)[:, None]))

    def of_kind(kind: str) -> Tensor:
        if kind == families.SLIDING and (window := family.window) is not None:
            return near(lambda query, key: query - key < window)
        if kind == families.CHUNKED and (chunk := family.chunk) is not None:
            return near(lambda query, key: query // chunk == key // chunk)
        return additive(allowed_RQW)

    if not family.mask_kinds:
        return of_kind(families.SLIDING)
    # state modules take a 2-D mask of padding; rows are never padded here
    none: dict[str, Any] = dict.fromkeys(families.STATE_KINDS) if family.has_states else {}
    return {**none, **{kind: of_kind(kind) for kind in family.mask_kinds}}
