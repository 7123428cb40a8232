"""The source of a training step's features: the frozen target in this process, or a folder that it has filled.

    online     tokens --> target.encode --> features           at every step
    on disk    tokens --> target.encode --> FeatureStore       once: `write_features`
                                            FeatureStore --> features at every step

`batch_of` distinguishes the two by the type of the examples; the training loop does not.

Shapes: R examples of a batch, T tokens of the longest of them, N tokens of all, D hidden size, F
feature width.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from eyas.core.target import Target
from eyas.drafters import Batch, DraftMethod
from eyas.errors import FitError, InputError, ModelError, OptionError
from eyas.nn import Documents
from eyas_train._tensors import DTYPES, stored
from eyas_train.data import Batches
from eyas_train.store import FeatureStore, StoredExamples


def batch_of(batches: Batches, indices: Sequence[int], drafter: DraftMethod) -> Batch:
    """Return these examples, packed, with the features that the drafter's loss reads."""
    target, examples = drafter.target, batches.examples
    tokens_N, counted_N, documents = batches.load(indices)
    if isinstance(examples, StoredExamples):
        examples.expect(indices, drafter.train_feature_layers)
        stored_NF = torch.cat([examples.features(i, drafter.train_feature_layers) for i in indices])
        features_NF = stored_NF.to(target.device).to(target.dtype)  # moved first: on disk the dtype is the smaller one
    else:
        features_NF = (batches.read or partial(encode, target))(tokens_N, documents, drafter.train_feature_layers)
    return Batch(tokens_N.to(target.device), features_NF, counted_N.to(target.device), documents)


def fetch_ahead(batches: Batches, coming: Iterable[Sequence[int]], drafter: DraftMethod) -> None:
    """Begin to fetch the features of batches that are read soon, if they are not on this machine."""
    if isinstance(batches.examples, StoredExamples):
        batches.examples.expect([i for batch in coming for i in batch], drafter.train_feature_layers)


def encode(target: Target, tokens_N: Tensor, documents: Documents, layers: Sequence[int]) -> Tensor:
    """Return [N, F]: the target's hidden states. It reads the examples padded to the longest; padding is
    left out of the result.
    """
    lengths_R = torch.tensor(documents.lengths)
    is_token_RT = torch.arange(int(lengths_R.max())) < lengths_R[:, None]
    tokens_RT = torch.zeros(is_token_RT.shape, dtype=torch.long).masked_scatter_(is_token_RT, tokens_N)
    return target.encode(tokens_RT.to(target.device), layers)[is_token_RT.to(target.device)]


def layers_for_training(target: Target, methods: Iterable[tuple[type[DraftMethod], Any]]) -> tuple[int, ...]:
    """Return all layers of this target that the losses of these methods read.

    Args:
        methods: (method, its options; None for the default ones).

    Raises:
        OptionError: a method cannot be trained.
    """
    layers: set[int] = set()
    for method, options in methods:
        if not method.trainable:
            raise OptionError(f"the method {method.__module__.rpartition('.')[2]} has nothing to train")
        options = method.Options() if options is None else options
        ask = getattr(method, "new_head_layers", None)  # optional: otherwise a head with random weights knows them
        layers |= set(ask(target, options) if ask else method.random(target, options).train_feature_layers)
    return tuple(sorted(layers))


def write_features(
    store: FeatureStore,
    target: Target,
    shards: Sequence[int],
    batch_tokens: int,
    on_batch: Callable[[int], None] = lambda tokens: None,
) -> None:
    """Make these shards. Each is written when it is whole, so an interrupt leaves whole shards.

    Args:
        batch_tokens: tokens that the target reads at a time, padding included.
        on_batch: called with the number of tokens read since the last call.

    Raises:
        InputError: the disk is full, or cannot be written.
        FitError: the accelerator's memory is too small for a batch.
        ModelError, OptionError: features that are NaN, or too large for the dtype on disk.
    """
    for shard in shards:
        features = _shard_features(store, target, shard, batch_tokens, on_batch)
        try:
            store.write_shard(shard, features)
        except OSError as error:
            progress = f"{store.progress()} are whole and can be trained from"
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                reason = error.strerror or error
                raise InputError(f"cannot write into {store.folder}: {reason}; {progress}") from error
            gib = sum(store.manifest.shards[i].bytes for i in store.missing()) / 2**30
            raise InputError(
                f"no space left for {store.folder}: {progress}; free {gib:,.1f} GiB and run the same command again, it goes on"
            ) from error


def _shard_features(
    store: FeatureStore, target: Target, shard: int, batch_tokens: int, on_batch: Callable[[int], None]
) -> dict[int, list[Tensor]]:
    """Return by layer its tensors as they are on disk. The target reads examples of about one length together."""
    settings, numbers = store.settings, store.in_shard(shard)
    batches = Batches([store.example(i) for i in numbers], batch_tokens)
    begins = [0, *accumulate(batches.lengths)]
    features = {
        k: [torch.empty(begins[-1], tensor.width, dtype=tensor.dtype) for tensor in settings.tensors(k)]
        for k in settings.layers
    }
    for batch in batches.plan(None):
        tokens_N, _, documents = batches.load(batch)
        try:
            exact_NF = encode(target, tokens_N, documents, settings.layers)
        except torch.OutOfMemoryError as error:
            raise FitError(
                f"out of memory with a batch of {len(tokens_N)} tokens; lower --batch-tokens (now {batch_tokens})"
            ) from error
        for k, exact_ND in zip(settings.layers, torch.split(exact_NF, settings.hidden_size, -1), strict=True):
            rounded = stored(exact_ND, DTYPES[settings.dtype])
            if not bool(rounded[0].isfinite().all()):
                _refuse_infinite(exact_NF, tokens_N, documents, target, settings.dtype)
            for whole, value in zip(features[k], rounded, strict=True):
                for i, rows in zip(batch, torch.split(value.cpu(), list(documents.lengths)), strict=True):
                    whole[begins[i] : begins[i] + len(rows)] = rows
        on_batch(len(tokens_N))
    return features


def _refuse_infinite(features_NF: Tensor, tokens_N: Tensor, documents: Documents, target: Target, dtype: str) -> None:
    if bool(features_NF.isfinite().all()):
        raise OptionError(
            f"features of this target reach {float(features_NF.abs().max()):.3g}, too large for {dtype}: store bfloat16"
        )
    bad_row = int((~features_NF.isfinite()).any(-1).nonzero()[0])
    span = slice(int(documents.begin_N()[bad_row]), int(documents.end_N()[bad_row]))
    where = target.first_bad_layer(tokens_N[span].tolist())
    raise ModelError(
        f"the target's features are NaN or infinite ({where}): its weights or dtype ({target.dtype}) are broken"
    )
