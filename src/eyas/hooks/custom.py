"""`eyas.hf(...)`: the object that `model.generate(..., custom_generate=...)` calls instead of its
own decoding loop.

With an object as `custom_generate`, transformers 5.17 to 5.23 drop `streamer`, `assistant_model`
and `synced_gpus` without a word; with a folder it does not say which one. They are local variables
of the `generate` that is calling, where `arguments_of_generate` looks. Nothing is changed there. If
that function has another name one day, nothing is found.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from eyas.api import Stats
from eyas.arguments import whole_number
from eyas.core.target import turn_of
from eyas.errors import InputError, OptionError
from eyas.hooks.loop import Lockstep, decode
from eyas.hooks.models import Settings, llm_for
from eyas.hooks.refusals import check_call, media_of
from eyas.hooks.sampling import Batch, Distribution

MODULE = "transformers.generation.utils"
FRAMES = 6  # between its `generate` and the code that asks, at most


def hf(
    draft: Any = None,
    method: str | None = None,
    *,
    streamer: Any = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    stop_strings: str | Sequence[str] | None = None,
    batch_size: int | None = None,
    **options: Any,
) -> CustomGenerate:
    """Make an object for `model.generate(**inputs, custom_generate=eyas.hf(...))`.

    The text is the model's own: greedily the same ids, sampled the same distribution.

    Args:
        draft: folder or hub id of a draft head, or the name of a method that needs none. None:
            `suffix`, which drafts from the text.
        method: as for `eyas.load`.
        streamer: a streamer of transformers; generate's own `streamer` works, too.
        tokenizer: the one that `stop_strings` need.
        stop_strings: given here with the tokenizer, as transformers does not hand its own `tokenizer` on.
        batch_size: rows that are decoded together. None: 1 on a CPU, all of them elsewhere, or
            where criteria or a streamer look at the rows.
        options: the other options of `eyas.load`: the method's, `draft_with`, `kernels`,
            `weights`, ...

    Raises:
        OptionError: an option that belongs to the model. Others, and the head, are checked by the
            first call.
    """
    if isinstance(draft, PreTrainedModel):
        raise OptionError("eyas.hf makes what generate calls: write custom_generate=eyas.hf(), with its parentheses")
    if stop_strings is not None and tokenizer is None:
        raise InputError("stop_strings need the tokenizer: eyas.hf(stop_strings=..., tokenizer=tokenizer)")
    rows = None if batch_size is None else whole_number("batch_size", batch_size)
    return CustomGenerate(Settings(draft, method, options), streamer, tokenizer, stop_strings, rows)


@dataclass
class CustomGenerate:
    """Decodes for `model.generate`. It serves any number of calls and models."""

    settings: Settings
    streamer: Any = None
    tokenizer: PreTrainedTokenizerBase | None = None
    stop_strings: str | Sequence[str] | None = None
    batch_size: int | None = None
    stats: tuple[Stats, ...] = field(default=(), repr=False)

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Decode; called by `generate` with what it has prepared. Returns what `generate` returns."""
        self.stats = ()
        given = arguments_of_generate()
        check_call(model, generation_config, model_kwargs, given)
        criteria = stopping_criteria
        if self.stop_strings is not None:
            criteria = with_stop_strings(stopping_criteria, self.tokenizer, self.stop_strings)
        media = media_of(model, model_kwargs)
        batch = Batch.from_call(input_ids, model_kwargs.get("attention_mask"), model_kwargs.get("position_ids"), media)
        with turn_of(model):
            llm = llm_for(model, self.settings)
            distribution = Distribution.from_call(batch, generation_config, logits_processor, criteria)
            streamer = self._streamer(streamer or given.get("streamer"), input_ids)
            lockstep = Lockstep(distribution, generation_config, logits_processor, criteria, streamer)
            rows = len(batch.prompts)
            batch_size = (
                rows if lockstep.needs_all_rows else self.batch_size or (1 if llm.target.device.type == "cpu" else rows)
            )
            self.stats = decode(llm, distribution, lockstep, batch_size)
        if streamer is not None:
            streamer.end()
        return _output(lockstep, generation_config)

    def _streamer(self, given: Any, input_ids: Tensor) -> Any:
        """Return the streamer, our own after it was shown the prompt."""
        if given is not None and self.streamer is not None:
            raise OptionError("there are two streamers: give one, to generate or to eyas.hf")
        if self.streamer is not None:
            self.streamer.put(input_ids.cpu())
        return given if given is not None else self.streamer


def arguments_of_generate() -> Mapping[str, Any]:
    """Return the local variables of the `generate` of transformers that has called; empty without one."""
    frame = sys._getframe(1)
    for _ in range(FRAMES):
        if frame.f_back is None:
            break
        frame = frame.f_back
        if frame.f_code.co_name == "generate" and frame.f_globals.get("__name__") == MODULE:
            return dict(frame.f_locals)
    return {}


def with_stop_strings(
    criteria: Iterable[StoppingCriteria], tokenizer: Any, strings: str | Sequence[str]
) -> StoppingCriteriaList:
    """Return the criteria with one for stop strings, which transformers makes only where it has their tokenizer."""
    listed = [strings] if isinstance(strings, str) else list(strings)
    return StoppingCriteriaList([*criteria, StopStringCriteria(tokenizer, listed)])


def _output(lockstep: Lockstep, config: GenerationConfig) -> Tensor | GenerateDecoderOnlyOutput:
    """Return what `generate` returns. Keys and values are eyas' own, so `past_key_values` stays None."""
    sequences = lockstep.sequences()
    if not config.return_dict_in_generate:
        return sequences
    scores, logits = (
        lockstep.scores if lockstep.wants_scores else None,
        lockstep.logits if lockstep.wants_logits else None,
    )
    return GenerateDecoderOnlyOutput(sequences=sequences, scores=scores, logits=logits)  # type: ignore[arg-type]
