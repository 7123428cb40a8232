"""New heads of eyas' own methods, as they are before their training. `DraftMethod.init_for_training` asks for them, and
`start` fits them to data."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from eyas.blocks import BlockMethod
from eyas.core.target import Target
from eyas.drafters import DraftMethod, eagle3, mtp, peagle
from eyas.drafters.eagle3 import MAX_DRAFT_VOCABULARY
from eyas.drafters.tools import mask_token
from eyas.errors import CheckpointError
from eyas_train._chat import FIRST_COUNTABLE
from eyas_train.data import Example, example_tensors
from eyas_train.start import final_scale, norm_scale

log = logging.getLogger("eyas.train")  # the command line shows its messages

# names of the matrices whose products a layer of transformers adds to its input
ADDED = ("o_proj.weight", "down_proj.weight", "down_proj")

MethodT = TypeVar("MethodT", bound=DraftMethod)


def new_head(kind: type[MethodT], target: Target, options: Any, seed: int, counts_V: Tensor | None) -> MethodT:
    """Return a method with initial weights for training; see `DraftMethod.init_for_training`."""
    if issubclass(kind, mtp.Method):
        return _module_of(kind, target, options, seed)  # type: ignore[return-value]
    if issubclass(kind, eagle3.Method):
        return _eagle3(kind, target, options, seed, counts_V)  # type: ignore[return-value]
    if issubclass(kind, BlockMethod):
        return _block(kind, target, options, seed, counts_V)  # type: ignore[return-value]
    return kind.random(target, options, seed)  # type: ignore[return-value]


def _eagle3(
    kind: type[eagle3.Method], target: Target, options: Any, seed: int, counts_V: Tensor | None
) -> eagle3.Method:
    """Return a head of which norm and head are copies of the target's, and whose layers add nothing yet. The draft
    vocabulary has the most frequent tokens of `counts_V`."""
    options = options or kind.Options()
    ids_v = None if counts_V is None else choose_draft_vocabulary(counts_V, options.head.draft_vocab)
    heads = {} if options.head.kv_heads is None else {"num_kv_heads": options.head.kv_heads}
    method = kind.new(target, options, seed, ids_v, **heads)
    net, D, weight = method.net, target.hidden_size, getattr(target.family.head, "weight", None)
    with torch.no_grad():
        net.fc.weight.zero_()
        torch.nn.init.eye_(net.fc.weight[:, -D:])
        for layer in (net.layer, *net.later_layers):
            layer.attention.o.weight.zero_()
            layer.mlp.down.weight.zero_()
        net.norm.weight.copy_(final_scale(target))
        if net.head is not None and weight is not None and weight.shape == (target.vocab_size, D):
            rows_vD = weight if ids_v is None else weight[ids_v.to(weight.device)]
            net.head.weight.copy_(rows_vD * target.family.logit_scale)  # a softcap is left out
    if isinstance(method, peagle.Method):
        method.mask_token = mask_token(options.head.mask_token, target, counts_V)
    return method


def _module_of(kind: type[mtp.Method], target: Target, options: Any, seed: int) -> mtp.Method:
    """Return the module of the target's checkpoint; a new one where it has none."""
    try:
        net, start = mtp.load_net(target, mtp.own_checkpoint(target)), "the module in the target's checkpoint"
    except CheckpointError:
        net, start = _new_net(target, seed), "a new module: the target's checkpoint has none"
    log.info("mtp: training begins with %s", start)
    method = kind(target, options, net)
    method.is_new = start.startswith("a new")
    return method


@torch.no_grad()
def _new_net(target: Target, seed: int) -> mtp.Net:
    """Return a module that first predicts the same tokens as the target's lm_head, from the same feature. `eh_proj`
    passes that feature on, the layer adds nothing yet, and the last norm brings it to the size of the target's features.
    """
    net = mtp.random_net(target, seed)
    module: Any = net.module
    first = getattr(module.config, "mtp_hidden_states_first", False)
    of_feature, of_embedding = module.eh_proj.weight.chunk(2, dim=1)[:: 1 if first else -1]
    nn.init.eye_(of_feature)
    nn.init.zeros_(of_embedding)
    for name, weight in module.mtp_block.named_parameters():
        if name.endswith(ADDED):
            weight.zero_()
    last_norm: Any = module.post_norm if net.shared_norm is None else net.shared_norm
    if last_norm is not None:
        scale_D = final_scale(target)
        last_norm.weight += scale_D.square().mean().sqrt() - norm_scale(last_norm, torch.ones_like(scale_D))
    return net


def _block(kind: type[BlockMethod], target: Target, options: Any, seed: int, counts_V: Tensor | None) -> BlockMethod:
    """Return a head whose layers add nothing yet, whose convolutions change nothing, and whose Markov head and selector
    prefer no token."""
    method = kind.random(target, options, seed, counts_V)
    with torch.no_grad():
        for layer in method.net.typed_layers:
            layer.attention.o.weight.zero_()
            layer.mlp.down.weight.zero_()
            for convolution in (layer.attention_conv, layer.mlp_conv):
                if convolution is not None:
                    convolution.kernel.weight.zero_()
        for prefers in (method.net.markov, method.net.selector):
            if prefers is not None:
                prefers.after.weight.zero_()
    return method


def count_tokens(examples: Sequence[Example], vocab_size: int) -> Tensor:
    """Return int64 [V]: how often the prediction of each token is trained in one epoch."""
    counts_V = torch.zeros(vocab_size, dtype=torch.long)
    for i in range(len(examples)):
        ids_T, counted_T = example_tensors(examples, i)
        tokens = ids_T[FIRST_COUNTABLE:][counted_T[FIRST_COUNTABLE:]]
        counts_V.index_add_(0, tokens, torch.ones_like(tokens))
    return counts_V


def choose_draft_vocabulary(counts_V: Tensor, size: int | None) -> Tensor | None:
    """Return the most frequent tokens, int64 [v], ascending; None for the whole vocabulary. With `size` tokens, or as many
    as occur."""
    distinct = int((counts_V > 0).sum())
    if size is not None and size > distinct:
        told_size = "head.draft_vocab %d: the training data has %d different tokens that count, so it is %d"
        log.info(told_size, size, distinct, distinct)
    size = min(size or MAX_DRAFT_VOCABULARY, max(distinct, 1))
    if size >= len(counts_V):
        return None
    return counts_V.argsort(descending=True, stable=True)[:size].sort().values
