"""The processors and criteria that generate has prepared, as the engine's sampling.

`LogitsProcessorList` is run in order. Its beginning and its end are steps of the engine where they
are plain:

    [repetition penalty] [min_length, min_new_tokens] | anything else, in order | [temperature] [top_k] [top_p] [min_p]
                 Sampling, min_tokens                   processors of the request            Sampling

The engine's own steps cost nothing; a processor runs once for each node, with the node's own text. A step that
does not fit this order (`typical_p`, which comes after `top_p`) makes the end part of the middle, so the
distribution is transformers' in every case.

Letters: B rows, T tokens of the widest prompt, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitNormalization,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import EosTokenCriteria

from eyas.core.requests import Request, RequestFeature
from eyas.core.sampling import Processor, Sampling
from eyas.core.sockets import FEATURE
from eyas.errors import InputError
from eyas.hooks.refusals import refused

MAX_SEED = 2**63 - 1  # seeds are below it


@dataclass(frozen=True)
class Distribution:
    """The distribution of each row's tokens, and the limits of its length."""

    batch: Batch
    max_new_tokens: int
    eos: frozenset[int]
    custom_criteria: bool  # whether there are stopping criteria other than EOS and the length
    sampling: Sampling  # without a seed
    min_tokens: int
    processors: tuple[Any, ...]  # processors of transformers, in order
    seeds: tuple[int, ...] = field(repr=False)  # one for each row; none where nothing is drawn

    @classmethod
    def from_call(
        cls, batch: Batch, config: GenerationConfig, processors: LogitsProcessorList, criteria: StoppingCriteriaList
    ) -> Distribution:
        """Return the distribution of a call. Seeds are drawn from torch's generator."""
        if any("ClassifierFreeGuidance" in type(processor).__name__ for processor in processors):
            raise refused("guidance_scale", "it runs the model a second time, on a text of its own")
        length, eos, others = _stopping_rules(criteria)
        new = length - batch.width
        # LogitNormalization comes last and changes no distribution
        left = [p for p in processors if type(p) is not LogitNormalization]
        settings: dict[str, Any] = {}
        left, min_tokens = _take_leading(left, batch, eos, settings)
        if config.do_sample:
            settings["temperature"] = 1.0
            left = _take_trailing(left, settings)
        seeds = torch.randint(MAX_SEED, (len(batch.prompts),)).tolist() if config.do_sample else ()
        if left:
            plug = FEATURE.plug_for("a logits processor")
            left = [plug.check_processor(processor) for processor in left]
        sampling = Sampling(**settings)
        return cls(batch, new, eos, others, sampling, min(min_tokens, new), tuple(left), tuple(seeds))

    def request(self, row: int, logits: bool) -> Request:
        """Return the engine's request for a row. `logits`: its steps have the raw logits."""
        sampling = replace(self.sampling, seed=self.seeds[row]) if self.seeds else self.sampling
        return Request(
            self.batch.prompts[row],
            self.max_new_tokens,
            sampling,
            self.eos,
            min_tokens=self.min_tokens,
            features=self._features(row, logits),
            media=self.batch.media,
        )

    def _features(self, row: int, logits: bool) -> tuple[RequestFeature, ...]:
        processors = tuple(self._for_row(processor, row) for processor in self.processors)
        if not processors and not logits:
            return ()
        plug = FEATURE.plug_for("a logits processor" if processors else "output_logits")
        return plug.features({"raw_logits": logits}, processors, None, ())

    def _for_row(self, processor: Any, row: int) -> Processor:
        """Return a processor that is shown one row alone, and sees it as in the batch."""
        if type(processor) is PrefixConstrainedLogitsProcessor:
            allowed = processor._prefix_allowed_tokens_fn
            processor = PrefixConstrainedLogitsProcessor(lambda _, text: allowed(row, text), 1)
        rows = len(self.batch.prompts) if _may_know_rows(processor) else 1
        padding = self.batch.padding[row]
        if rows == 1 and not padding:
            return processor  # type: ignore[no-any-return]
        return _InBatch(processor, self.batch.ids_BT[row : row + 1, :padding], rows, row)


class _InBatch:
    """A processor that sees a row's text after its padding; where it may tell rows apart, as that row of a batch."""

    def __init__(self, processor: Any, padding_1T: Tensor, rows: int, row: int) -> None:
        self.processor, self.padding_1T = processor, padding_1T
        self.rows, self.row = (rows, row) if rows > 1 else (1, 0)
        self.__name__ = type(processor).__name__

    def __call__(self, ids_1T: Tensor, scores_1V: Tensor) -> Tensor:
        ids_1T = torch.cat([self.padding_1T.to(ids_1T.device), ids_1T], 1)
        scores_BV: Tensor = self.processor(ids_1T.repeat(self.rows, 1), scores_1V.repeat(self.rows, 1))
        return scores_BV[self.row : self.row + 1]


def _may_know_rows(processor: Any) -> bool:
    """Return whether a processor may treat rows differently: a processor from another library may, and three of
    transformers."""
    kind = type(processor)
    own_row = isinstance(getattr(processor, "prompt_ignore_length", None), Tensor) or kind.__name__.startswith(
        "Encoder"
    )
    return own_row or not kind.__module__.startswith("transformers.")


def _stopping_rules(criteria: StoppingCriteriaList) -> tuple[int, frozenset[int], bool]:
    """Return (most tokens of a row with padding and prompt, ids that end it, whether there are other criteria)."""
    lengths = [criterion.max_length for criterion in criteria if type(criterion) is MaxLengthCriteria]
    ends = [criterion for criterion in criteria if type(criterion) is EosTokenCriteria]
    eos = frozenset(int(token) for criterion in ends for token in criterion.eos_token_id.flatten().tolist())
    return min(lengths), eos, len(lengths) + len(ends) < len(criteria)


def _take_leading(
    processors: Sequence[Any], batch: Batch, eos: frozenset[int], settings: dict[str, Any]
) -> tuple[list[Any], int]:
    """Return (the processors after those that the engine does first, its min_tokens); writes into `settings`."""
    left, min_tokens = list(processors), 0
    first = left[0] if left else None
    if type(first) is RepetitionPenaltyLogitsProcessor and _hides_padding(first.prompt_ignore_length, batch):
        settings["repetition_penalty"] = float(left.pop(0).penalty)
    while left and type(left[0]) in (MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor):
        if frozenset(torch.as_tensor(left[0].eos_token_id).flatten().tolist()) != eos:
            break
        first = left.pop(0)
        counts_all = type(first) is MinLengthLogitsProcessor
        counted = first.min_length if counts_all else first.prompt_length_to_skip + first.min_new_tokens
        min_tokens = max(min_tokens, counted - batch.width)
    return left, min_tokens


def _hides_padding(ignored: Any, batch: Batch) -> bool:
    """Return whether a repetition penalty leaves out each row's padding and nothing else, as the engine does."""
    if isinstance(ignored, Tensor):
        return tuple(ignored.tolist()) == batch.padding
    return ignored is None and not any(batch.padding)


def _take_trailing(processors: Sequence[Any], settings: dict[str, Any]) -> list[Any]:
    """Return the processors before those that the engine does last; writes into `settings`."""
    left = list(processors)
    for kind, name in ((MinPLogitsWarper, "min_p"), (TopPLogitsWarper, "top_p"), (TopKLogitsWarper, "top_k")):
        plain = left and type(left[-1]) is kind and left[-1].filter_value == -torch.inf
        if plain and getattr(left[-1], "min_tokens_to_keep", 1) == 1 and getattr(left[-1], name) > 0:
            settings[name] = getattr(left.pop(), name)
    if left and type(left[-1]) is TemperatureLogitsWarper and left[-1].temperature >= 1e-5:
        settings["temperature"] = left.pop().temperature
    return left


@dataclass(frozen=True)
class Batch:
    """The rows of a batch, padded on the left to one width."""

    ids_BT: Tensor  # int64, with the padding
    padding: tuple[int, ...]  # tokens on the left of each row that are not part of its prompt
    prompts: tuple[tuple[int, ...], ...]  # without padding
    media: Mapping[str, Any] | None = None  # see `Request.media`; the batch has one row then

    @property
    def width(self) -> int:
        """The number of columns: prompt and answer so far, padding included."""
        return int(self.ids_BT.shape[1])

    @classmethod
    def from_call(
        cls,
        ids_BT: Tensor,
        mask_BT: Tensor | None,
        positions: Tensor | None = None,
        media: Mapping[str, Any] | None = None,
    ) -> Batch:
        """Read a batch; raise InputError for a mask that hides more than padding on the left, or other positions."""
        rows, width = ids_BT.shape
        if mask_BT is None:
            padding = [0] * rows
        else:
            mask = (mask_BT != 0).long()
            padding = (width - mask.sum(-1)).tolist()
            if mask.shape != ids_BT.shape or not all(
                bool(row[count:].all()) for row, count in zip(mask, padding, strict=True)
            ):
                raise InputError(
                    "attention_mask hides tokens on the right or inside of a prompt: pad on the left (padding_side='left')"
                )
        if any(count == width for count in padding):
            raise InputError("a prompt is empty: give at least one token that the attention mask shows")
        if media and (rows > 1 or padding[0]):
            raise InputError(f"{min(media)}: prompts with images are read one by one, without padding")
        if positions is not None and not (media and positions.ndim == 3):
            _check_positions(positions, padding, rows, width)
        prompts = tuple(tuple(row[count:]) for row, count in zip(ids_BT.tolist(), padding, strict=True))
        return cls(ids_BT, tuple(padding), prompts, media or None)


def _check_positions(positions: Tensor, padding: list[int], rows: int, width: int) -> None:
    """Raise InputError unless the prompts' tokens are counted from 0."""
    listed = positions.tolist() if positions.ndim == 2 else [[]]
    listed = listed * rows if len(listed) == 1 else listed
    expected = [list(range(width - count)) for count in padding]
    if [row[count:] for row, count in zip(listed, padding, strict=False)] != expected:
        raise InputError(
            "position_ids: eyas counts the tokens of a prompt from 0, as generate does by itself: leave them out"
        )
