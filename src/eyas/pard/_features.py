"""The part of a PARD-2 model that reads the target's features: a matrix, whose product is added to the
embeddings.

    input of a token   =   embedding of the token   +   scale * target_proj(features of the token before)

The matrix is in a file of its own, warp_model.bin, beside a plain language model, which drafts without
it as well.

Letters: R rows of a forward, Q tokens, F features, D hidden of the draft model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eyas.checkpoints.pard import FEATURE_FILE, FeatureConfig, feature_config, read_projection
from eyas.core.target import Target
from eyas.errors import CheckpointError, first_line

__all__ = ["FeatureInput"]


class FeatureInput:
    """Adds the projected features to what the draft model's embedding table returns."""

    def __init__(self, table: nn.Module, projection: nn.Linear, config: FeatureConfig) -> None:
        self.projection, self.scale, self.layers = projection, config.scale, config.layers
        self.waiting_RQD: Tensor | None = None  # for the next tokens
        table.register_forward_hook(self._add)

    @classmethod
    def of_model(cls, draft: Target, target: Target) -> FeatureInput | None:
        """Return the part of a PARD-2 model; None for one of PARD, and for a target of other sizes
        than the one that it was trained for."""
        config = feature_config(draft.model.config.to_dict())
        if config is None:
            return None
        fits = config.width == len(config.layers) * target.hidden_size and max(config.layers) <= target.num_layers
        place = draft.model.name_or_path
        if not fits or not place:
            return None
        weight, bias = read_projection(_file(place), (draft.hidden_size, config.width))
        with torch.device(draft.device):
            projection = nn.Linear(config.width, draft.hidden_size, bias=bias is not None, dtype=draft.dtype)
        projection.load_state_dict({"weight": weight} | ({} if bias is None else {"bias": bias}))
        return cls(draft.family.embedding, projection.requires_grad_(False), config)

    @contextmanager
    def added(self, features_RQF: Tensor) -> Iterator[None]:
        """Let the model read these features within this context: of the first Q tokens in its first forward, then of
        those that follow."""
        features_RQF = features_RQF.to(self.projection.weight.dtype)
        self.waiting_RQD = self.projection(features_RQF) * self.scale
        try:
            yield
        finally:
            self.waiting_RQD = None

    def _add(self, table: nn.Module, args: Any, embeddings_RQD: Tensor) -> Tensor | None:
        """Add the features; called after each forward of the embedding table."""
        if self.waiting_RQD is None:
            return None
        tokens = embeddings_RQD.shape[1]
        now_RQD, self.waiting_RQD = self.waiting_RQD[:, :tokens], self.waiting_RQD[:, tokens:]
        return embeddings_RQD + now_RQD


def _file(place: str) -> Path:
    """Return the path of the matrix's file, fetched from the hub if necessary."""
    local = Path(place).expanduser() / FEATURE_FILE
    if local.parent.is_dir():
        return local
    import huggingface_hub

    try:
        return Path(huggingface_hub.hf_hub_download(place, FEATURE_FILE))
    except Exception as error:  # the hub's client raises errors of several libraries
        raise CheckpointError(
            f"{place}: its {FEATURE_FILE} cannot be fetched ({first_line(error, 200)}); without it the model drafts "
            "from the text alone: --features false"
        ) from error
