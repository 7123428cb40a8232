"""`eyas.hf(...)`: the object that `model.generate(..., custom_generate=...)` calls instead of its own decoding loop.

With an object as `custom_generate`, transformers 5.17 to 5.23 drop `streamer`, `assistant_model` and `synced_gpus`
without a word; with a folder it does not say which one. They are local variables of the `generate` that is calling,
where `arguments_of_generate` looks. If that function has another name one day, nothing is found.

`eyas.attach(model)` sets two attributes of the instance, as transformers does for repositories with a
`custom_generate` folder. `generate` calls the class' own with such an object, and `_eyas` holds the LLMs of the
model. They refer to the model, so they are freed together with it. Copies of the model (deepcopy, pickle) begin
without them.

With `custom_generate/` in the folder of a draft head, the head's name alone is enough for `generate`: transformers runs a
file there that calls `generate_by_folder`. eyas-train writes it.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from types import MethodType
from typing import Any, cast

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

from eyas import api
from eyas.arguments import whole_number
from eyas.core.drafter import Drafter
from eyas.core.target import turn_of
from eyas.errors import InputError, ModelError, OptionError
from eyas.hooks.loop import Lockstep, decode
from eyas.hooks.refusals import check_call, media_of, refused
from eyas.hooks.sampling import Batch, Distribution
from eyas.targets.loading import version_of

MODULE = "transformers.generation.utils"
FRAMES = 6  # between its `generate` and the code that asks, at most
ATTRIBUTE = "_eyas"
MAX_LLMS = 4  # LLMs that are kept for a model; each may hold a draft head, and kernels' copy of the weights
# options of `eyas.load` that describe the target, which is loaded already
TARGET_OPTIONS = (
    "target", "gguf_file", "cache", "tokenizer", "dtype", "torch_dtype", "device", "device_map", "offload_folder",
    "trust_remote_code",
)  # fmt: skip
MARK = "eyas_custom_generate"  # attribute of our function that replaces `generate`
OPTIONS = ("batch_size", "draft_with", "kernels", "method", "tree")  # options of eyas, which generate does not have


@dataclass(frozen=True)
class Settings:
    """The head, the method and the options that an attached model drafts with."""

    draft: Any = None
    method: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in TARGET_OPTIONS:
            if name in self.options:
                raise OptionError(f"{name} is the model's, which is loaded already: leave it out")

    @property
    def key(self) -> Hashable:
        """Equal for settings that make the same LLM."""
        draft = self.draft if isinstance(self.draft, Drafter) or self.draft is None else str(self.draft)
        return draft, self.method, repr(sorted(self.options.items()))


class _ModelState:
    def __init__(self) -> None:
        # LLMs by settings and version of the weights
        self.llms: OrderedDict[tuple[Hashable, Hashable], api.LLM] = OrderedDict()

    def __deepcopy__(self, memo: Any) -> _ModelState:
        return _ModelState()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, ()  # so that a saved model does not ask for eyas when it is loaded


_creation = threading.Lock()


def _state_of(model: PreTrainedModel) -> _ModelState:
    with _creation:
        state = model.__dict__.get(ATTRIBUTE)
        if not isinstance(state, _ModelState):
            state = model.__dict__[ATTRIBUTE] = _ModelState()
        return state


def llm_for(model: PreTrainedModel, settings: Settings) -> api.LLM:
    """Return the LLM of this model with these settings; made again if the weights, hooks or forwards have changed."""
    if not isinstance(model, PreTrainedModel):
        raise ModelError(f"eyas drafts for causal language models of transformers, not for {type(model).__name__}")
    if model.training:
        raise ModelError("the model is in training mode: call model.eval() first")
    llms = _state_of(model).llms
    key = settings.key, version_of(model)
    if key not in llms:
        for old in [old for old in llms if old[0] == settings.key]:
            del llms[old]
        llms[key] = api.load(model, settings.draft, settings.method, tokenizer=False, **settings.options)
        while len(llms) > MAX_LLMS:
            llms.popitem(last=False)
    llms.move_to_end(key)
    return llms[key]


def forget(model: PreTrainedModel) -> None:
    """Free the LLMs that eyas keeps for a model."""
    with _creation:
        model.__dict__.pop(ATTRIBUTE, None)


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
        raise OptionError("eyas.hf makes the callable: write custom_generate=eyas.hf(), with its parentheses")
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
    stats: tuple[api.Stats, ...] = field(default=(), repr=False)

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
        """Decode; called by `generate` with its prepared inputs. Return the result of `generate`."""
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
            usual = 1 if llm.target.device.type == "cpu" else rows
            batch_size = rows if lockstep.needs_all_rows else self.batch_size or usual
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
    """Return the result of `generate`. Keys and values are eyas' own, so `past_key_values` stays None."""
    sequences = lockstep.sequences()
    if not config.return_dict_in_generate:
        return sequences
    scores = lockstep.scores if lockstep.wants_scores else None
    logits = lockstep.logits if lockstep.wants_logits else None
    return GenerateDecoderOnlyOutput(sequences=sequences, scores=scores, logits=logits)  # type: ignore[arg-type]


def attach(model: PreTrainedModel, draft: Any = None, method: str | None = None, **options: Any) -> Attachment:
    """Let eyas decode for `model.generate`, pipelines and all other callers, until `detach(model)`, or to the
    end of a `with` block:

        with eyas.attach(model, "path/or/hub-id"):
            model.generate(**inputs)

    A second call replaces the first. The head is loaded at once.

    Args:
        model: a causal language model of transformers, in eval mode.
        draft, method, options: as for `eyas.hf`.

    Raises:
        ModelError, CheckpointError, OptionError: as `eyas.load`.
    """
    custom = hf(draft, method, **options)
    if not isinstance(model, PreTrainedModel):
        raise ModelError(f"eyas attaches to a causal language model of transformers, not to {type(model).__name__}")
    kind: Any = type(model)
    before = model.__dict__.get("generate")
    if before is not None and _custom(before) is None and getattr(before, "__func__", None) is not kind.generate:
        raise ModelError(
            "the model has a generate of its own already (a custom_generate of its repository, or another library's)"
        )
    with turn_of(model):
        llm_for(model, custom.settings)
    model.__dict__["generate"] = MethodType(_generate_by(custom, kind), model)
    return Attachment(model, custom, before)


def detach(model: PreTrainedModel) -> None:
    """Give the model its own `generate` back, and free the memory that eyas keeps for it, if something is
    attached."""
    if not isinstance(model, PreTrainedModel):
        raise ModelError(f"eyas detaches from a causal language model of transformers, not from {type(model).__name__}")
    if _custom(model.__dict__.get("generate")) is not None:
        del model.__dict__["generate"]
    forget(model)


class Attachment:
    """The result of `attach`: a context manager that returns the model, and undoes the attachment at its end."""

    def __init__(self, model: PreTrainedModel, custom: CustomGenerate, before: Any) -> None:
        self.model, self._custom, self._before = model, custom, before

    @property
    def stats(self) -> tuple[api.Stats, ...]:
        """Figures of each row of the last call."""
        return self._custom.stats

    def __enter__(self) -> PreTrainedModel:
        return self.model

    def __exit__(self, *raised: object) -> None:
        self.detach()

    def detach(self) -> None:
        """Undo this attachment: the one before it holds again, if there was one."""
        if _custom(self.model.__dict__.get("generate")) is not self._custom:
            return  # another one has taken its place
        if self._before is None:
            detach(self.model)
        else:
            self.model.__dict__["generate"] = self._before


def _custom(method: Any) -> CustomGenerate | None:
    return getattr(getattr(method, "__func__", None), MARK, None)


def _generate_by(custom: CustomGenerate, kind: Any) -> Any:
    signature = inspect.signature(kind.generate)

    @wraps(kind.generate)
    def generate(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        arguments = {name: value for name, value in bound.arguments.items() if name != "self"}
        arguments |= arguments.pop("kwargs", {})
        if arguments.get("custom_generate") is not None:  # the caller asks for something else
            return kind.generate(self, **arguments)
        return _generate_with(self, custom, arguments)

    setattr(generate, MARK, custom)
    return generate


def _generate_with(model: PreTrainedModel, custom: CustomGenerate, arguments: dict[str, Any]) -> Any:
    if arguments.get("cache_implementation") == "paged":
        raise refused("cache_implementation='paged'", "it decodes by generate_batch of transformers")
    configs = [config for config in (arguments.get("generation_config"), model.generation_config) if config is not None]
    strings = arguments.get("stop_strings") or next(filter(None, (config.stop_strings for config in configs)), None)
    if strings and (tokenizer := arguments.get("tokenizer")) is not None:
        arguments["stopping_criteria"] = with_stop_strings(arguments.get("stopping_criteria") or (), tokenizer, strings)
        arguments["stop_strings"] = None
    return cast(Any, type(model)).generate(model, **{**arguments, "custom_generate": custom})


def generate_by_folder(model: PreTrainedModel, **arguments: Any) -> Any:
    """Decode with the head whose folder or hub id was given to `generate` as `custom_generate`. Among the arguments
    may be `method`, `tree`, `kernels`, `draft_with` and `batch_size` of eyas."""
    head = arguments_of_generate().get("custom_generate")
    if not isinstance(head, str):
        raise OptionError(
            'this is for model.generate(..., custom_generate="folder of the head"); from elsewhere use eyas.hf(draft=...)'
        )
    options = {name: arguments.pop(name) for name in OPTIONS if name in arguments}
    return _generate_with(model, hf(head, **options), arguments)
