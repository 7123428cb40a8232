"""Where a training step's features come from: the frozen target in this process, or a folder that it filled before.

    online     tokens --> target.encode --> features           at every step
    on disk    tokens --> target.encode --> store.Store        once: `fill`
                                            Store --> features at every step

`batch_of` asks the examples: those of a store have `features` of their own. The loop does not know the difference.

Letters: R examples of a batch, T tokens of the longest of them, N tokens of all, F feature width.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from eyas.core.drafter import Batch, Drafter
from eyas.core.target import Target
from eyas.errors import FitError, InputError, ModelError, OptionError
from eyas.nn import Documents
from eyas.train.data import Batches
from eyas.train.store import DTYPES, Store, Stored

__all__ = ["batch_of", "fill", "studied"]

FULL = (errno.ENOSPC, errno.EDQUOT)


def batch_of(batches: Batches, indices: Sequence[int], drafter: Drafter) -> Batch:
    """These examples, packed, with the features that the drafter's loss reads."""
    target, source = drafter.target, batches.examples
    tokens_N, counted_N, documents = batches.load(indices)
    if isinstance(source, Stored):
        stored_NF = torch.cat([source.features(i, drafter.train_feature_layers) for i in indices])
        features_NF = stored_NF.to(target.device).to(target.dtype)  # moved as it is stored, the smaller of the two
    else:
        features_NF = _encoded(target, tokens_N, documents, drafter.train_feature_layers)
    return Batch(tokens_N.to(target.device), features_NF, counted_N.to(target.device), documents)


def _encoded(target: Target, tokens_N: Tensor, documents: Documents, layers: Sequence[int]) -> Tensor:
    """[N, F]: the target reads the examples padded to the longest; padding is left out of what it saw."""
    lengths = torch.tensor(documents.lengths)
    inside_RT = torch.arange(int(lengths.max())) < lengths[:, None]
    tokens_RT = torch.zeros(inside_RT.shape, dtype=torch.long).masked_scatter_(inside_RT, tokens_N)
    return target.encode(tokens_RT.to(target.device), layers)[inside_RT.to(target.device)]


def studied(target: Target, methods: Iterable[tuple[type[Drafter], Any]]) -> tuple[int, ...]:
    """All layers that the losses of these methods, each with its options, read of this target; OptionError when one cannot be trained."""
    layers = set[int]()
    for kind, options in methods:
        if not kind.trainable:
            raise OptionError(f"the method {kind.__module__.rpartition('.')[2]} has nothing to train")
        options = kind.Options() if options is None else options
        tell = getattr(kind, "layers_studied", None)  # a method of the user's own need not have it: then a head says it
        layers |= set(tell(target, options) if tell else kind.random(target, options).train_feature_layers)
    return tuple(sorted(layers))


def fill(
    store: Store,
    target: Target,
    shards: Sequence[int],
    batch_tokens: int,
    on_batch: Callable[[int], None] | None = None,
) -> None:
    """Make these shards; each is written when it is whole, so whatever ends this leaves whole ones.

    Args:
        batch_tokens: tokens that the target reads at a time, padding included.
        on_batch: called with the tokens read since the last call.

    Raises:
        InputError: the disk is full, or cannot be written.
        FitError: the accelerator's memory is too small for a batch.
        ModelError, OptionError: features that are NaN, or too large for the dtype on disk.
    """
    for shard in shards:
        features = _of_shard(store, target, shard, batch_tokens, on_batch)
        try:
            store.put(shard, features)
        except OSError as error:
            raise InputError(_cannot_write(store, error)) from error


def _cannot_write(store: Store, error: OSError) -> str:
    planned, missing = store.manifest.shards, set(store.missing())
    kept = f"{len(planned) - len(missing)} of {len(planned)} shards are whole and can be trained from"
    if error.errno not in FULL:
        return f"cannot write into {store.folder}: {error.strerror or error}; {kept}"
    gib = sum(planned[i].bytes for i in missing) / 2**30
    return f"no space left for {store.folder}: {kept}; free {gib:,.1f} GiB and run the same command again, it goes on"


def _of_shard(store: Store, target: Target, shard: int, batch_tokens: int, on_batch: Callable[[int], None] | None) -> dict[int, Tensor]:
    """layer -> [N, D], in the dtype that is written. Examples of about one length go through the target together."""
    settings, numbers = store.settings, store.in_shard(shard)
    batches, D = Batches([store.example(i) for i in numbers], batch_tokens), settings.hidden_size
    begins = [0, *accumulate(batches.lengths)]
    found = {k: torch.empty(begins[-1], D, dtype=DTYPES[settings.dtype]) for k in settings.layers}
    for batch in batches.plan(None):
        tokens_N, _, documents = batches.load(batch)
        try:
            features_NF = _encoded(target, tokens_N, documents, settings.layers)
        except torch.OutOfMemoryError as error:
            raise FitError(f"out of memory with a batch of {len(tokens_N)} tokens; lower --batch-tokens (now {batch_tokens})") from error
        kept_NF = features_NF.to(DTYPES[settings.dtype])
        if not bool(kept_NF.isfinite().all()):
            _refuse(features_NF, tokens_N, documents, target, settings.dtype)
        kept_NF, at = kept_NF.cpu(), 0
        for i in batch:
            length = batches.lengths[i]
            for j, k in enumerate(settings.layers):
                found[k][begins[i] : begins[i] + length] = kept_NF[at : at + length, j * D : (j + 1) * D]
            at += length
        if on_batch is not None:
            on_batch(len(tokens_N))
    return found


def _refuse(features_NF: Tensor, tokens_N: Tensor, documents: Documents, target: Target, dtype: str) -> None:
    if bool(features_NF.isfinite().all()):
        raise OptionError(f"features of this target reach {float(features_NF.abs().max()):.3g}, too large for {dtype}: store bfloat16")
    bad = int((~features_NF.isfinite()).any(-1).nonzero()[0])
    begins = [0, *accumulate(documents.lengths)]
    row = max(r for r, begin in enumerate(begins[:-1]) if begin <= bad)
    where = target.first_bad_layer(tokens_N[begins[row] : begins[row + 1]].tolist())
    raise ModelError(f"the target's features are NaN or infinite ({where}): its weights or dtype ({target.dtype}) are broken")
