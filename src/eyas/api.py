"""Load a target with a drafter; generate, stream, chat. Each of them adds up the Steps of the engine.

    llm = eyas.load("meta-llama/Llama-3.1-8B-Instruct", draft="path/or/hub-id")
    llm.generate("Why is the sky blue?").text

This module knows prompts, tokenizers and results; it knows no tree and no model family.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Unpack, cast, overload

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eyas import checkpoints, drafters, runners, tiny
from eyas.adaptive import auto, mode_of
from eyas.arguments import (
    GenerateKeywords,
    Messages,
    Prompt,
    as_processors,
    as_prompts,
    generate_keywords,
    load_keywords,
    on_or_off,
    plain_number,
    whole_number,
    with_generate_keywords,
    with_objects,
)
from eyas.core.constraints import Constraint
from eyas.core.dormant import Policy, adapted
from eyas.core.drafter import Drafter, build_options, flags, method_name
from eyas.core.engine import Decoder, Request, Step, keeps_well
from eyas.core.pretrained import check_config, read_tokenizer
from eyas.core.requests import TokenLogprobs, check_steps
from eyas.core.sampling import Processor, Sampling
from eyas.core.target import Target, pick_device, pick_dtype
from eyas.drafters._merge import Merged
from eyas.errors import CheckpointError, InputError, ModelError, OptionError, UnknownOptionError, near
from eyas.grammar import Grammars, structure_of
from eyas.metrics import StepTotals, tau, tokens_per_second
from eyas.text import StopStrings, encode, encode_part, render

__all__ = ["LLM", "Chat", "Piece", "Prompt", "Result", "Stats", "Stream", "check_processor", "load"]

DEFAULT_NEW_TOKENS = 256
DEFAULT_METHODS = {"eagle1": "eagle2"}  # head format -> default method, where they differ
AUTO = "auto"  # the draft that the list of published heads has for the target
WITHOUT_HEAD = "suffix"  # the default method without a head
SHOWN = 60  # characters of a text that a repr shows

# Processors of transformers with a memory: in a tree they would see tokens that are never emitted.
STATEFUL = frozenset(
    {
        "AlternatingCodebooksLogitsProcessor",
        "ClassifierFreeGuidanceLogitsProcessor",
        "DiaClassifierFreeGuidanceLogitsProcessor",
        "DiaEOSDelayPatternLogitsProcessor",
        "SynthIDTextWatermarkLogitsProcessor",
        "UnbatchedClassifierFreeGuidanceLogitsProcessor",
        "WhisperNoSpeechDetection",
        "WhisperTimeStampLogitsProcessor",
    }
)


# --- results --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stats:
    """Figures of one answer."""

    cycles: int  # forwards of the target after the prompt's own
    accepted_lengths: tuple[int, ...]  # draft tokens that each cycle emitted, without the bonus token
    seconds: float  # from the prompt to the last token
    prefill_seconds: float  # of these, the prompt's forward and the first token
    slow_processors: tuple[str, ...] = ()  # processors that run once for each node

    tokens: int = 0  # emitted by cycles; the first token, which comes from the prompt's forward, is not counted
    decisions: Mapping[str, int] = field(default_factory=dict)  # cycles by what was drafted: `Step.plan`
    predicted_tokens: int = 0  # accepted draft tokens that `prediction` proposed
    cached_tokens: int = 0  # tokens of the prompt whose keys and values were there already

    @classmethod
    def of(cls, totals: StepTotals, processors: Sequence[Processor] = ()) -> Stats:
        """The figures of the steps of one request."""
        return cls(
            cycles=totals.cycles,
            accepted_lengths=tuple(totals.accepted_lengths),
            seconds=totals.seconds,
            prefill_seconds=totals.prefill_seconds,
            slow_processors=tuple(type(p).__name__ for p in processors),
            tokens=totals.emitted,
            decisions=dict(totals.decisions),
            predicted_tokens=totals.predicted_tokens,
            cached_tokens=totals.cached_tokens,
        )

    @property
    def tau(self) -> float:
        """Tokens emitted per cycle, the bonus token included; 0 without cycles."""
        return tau(self.tokens, self.cycles)

    @property
    def tokens_per_second(self) -> float:
        """Tokens emitted by cycles per second after the prefill; 0 without cycles."""
        return tokens_per_second(self.tokens, self.seconds - self.prefill_seconds)


@dataclass(frozen=True, repr=False)
class Result:
    """An answer."""

    text: str  # without special tokens and without the stop string
    token_ids: tuple[int, ...]  # the new tokens up to the one that ended the text, an EOS included
    finish_reason: str  # "stop" | "length"
    stats: Stats
    logprobs: tuple[TokenLogprobs, ...] | None = None  # of token_ids, if they were asked for
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None  # of the prompt's tokens; the first one has none

    def __repr__(self) -> str:
        return (
            f"Result(text={_shortened(self.text)!r}, tokens={len(self.token_ids)}, finish_reason={self.finish_reason!r}, "
            f"tau={self.stats.tau:.2f}, tokens_per_second={self.stats.tokens_per_second:.0f})"
        )


@dataclass(frozen=True)
class Piece:
    """The part of a streamed answer that one cycle adds."""

    text: str  # empty while characters are incomplete or may become a stop string
    token_ids: tuple[int, ...]
    accepted: int  # draft tokens among them
    finish_reason: str | None  # set in the last piece
    logprobs: tuple[TokenLogprobs, ...] = ()  # of token_ids, if they were asked for


def _shortened(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


# --- loading --------------------------------------------------------------------------------------


def load(
    target: str | Path | PreTrainedModel | None = None,
    draft: str | Path | Drafter | None = None,
    method: str | None = None,
    *,
    draft_with: str | None = None,
    tokenizer: str | Path | PreTrainedTokenizerBase | Literal[False] | None = None,
    dtype: str | torch.dtype | None = "auto",
    device: str | torch.device | int | None = "auto",
    trust_remote_code: bool = False,
    kernels: str | bool | None = "auto",
    weights: str = "exact",
    activations: str = "exact",
    draft_weights: str = "exact",
    **options: Any,
) -> LLM:
    """Load a target with a drafter, ready to generate.

    Args:
        target: local folder, hub id, or a loaded model, which is used as it is. None: the embedded
            model with its own head.
        draft: local folder or hub id of a draft head, or a Drafter; or the name of a method that needs none. "auto": the first head
            that is listed for this target and can be read (docs/checkpoints.md); a warning says which.
        method: a name from `eyas methods` or a dotted path. None: the method that the head was made
            for; `suffix` without a head.
        draft_with: a second method, one that needs no head; its tree is merged with the first one's
            in every cycle.
        tokenizer: local folder, hub id or tokenizer, where it is not the target's own. False: none.
        dtype, device: "auto": float32 on a CPU; on an accelerator the checkpoint's own dtype.
        kernels: "auto": compiled kernels on a CPU for the model types that they support, CUDA
            graphs on a GPU once they have given the model's own numbers there, the model's own
            forward elsewhere. "on": the same, with a warning where they are not used, and for
            models that you loaded, too. "compile": the same with layers that have no kernels by
            torch.compile. "off": the model's own forward.
        weights: "exact", or rounded to "bfloat16", "int8" or "int4" by the kernels: faster, and a
            target of its own.
        activations: precision of what weights are multiplied by: "exact", or rounded by the kernels
            to "bfloat16" (for weights kept as bfloat16), "int16" or "int8" (for weights kept as
            int8 or int4): prompts and large trees cost less; a target of its own.
        draft_weights: "exact", or the head's rounded to "fp8" (on GPUs that multiply it) or "int4"
            (by the kernels): changes what is drafted, never the text.
        options: the method's own, for example tree={"nodes": 32, "depth": 5}; those that only the
            second method has go there. tree="auto" adapts the tree's size to this machine and
            drafts nothing where that is faster: the default, unless a tree is described.
            tree="fixed" keeps to the options in every cycle.

    Raises:
        ModelError, CheckpointError, OptionError: one line that says what is wrong and what to do.
    """
    options, dtype, device = load_keywords(options, dtype, device)
    if method is None and isinstance(draft, str) and draft in drafters.names() and not Path(draft).exists():
        draft, method = None, draft
    mode, options = ("fixed", options) if isinstance(draft, Drafter) and "tree" not in options else mode_of(options)
    if target is None:
        method = method or (tiny.BEST if draft in (None, AUTO) else None)
        if draft in (None, AUTO) and method is not None:
            draft = tiny.HEADS.get(drafters.find(method).reads)
    loaded_target, loaded_tokenizer = _load_target(target, tokenizer, dtype, device, trust_remote_code)
    loaded_target = runners.prepared(
        loaded_target,
        on_or_off(kernels),
        own=not isinstance(target, PreTrainedModel),
        weights=weights,
        activations=activations,
        draft_weights=draft_weights,
    )
    if isinstance(draft, str) and draft == AUTO:
        draft, drafter = _listed_drafter(loaded_target, method, options, draft_with)
    else:
        drafter = _load_drafter(loaded_target, draft, method, options, draft_with)
    runners.warm_up(drafter)
    policy = auto(drafter) if mode == "auto" else None
    return LLM(loaded_target, drafter, loaded_tokenizer, str(draft) if isinstance(draft, str | Path) else None, policy)


def _load_target(
    source: Any, tokenizer: Any, dtype: str, device: str, trust_remote_code: bool
) -> tuple[Target, PreTrainedTokenizerBase | None]:
    """The target and its tokenizer, from whatever names them."""
    if source is None:
        place = torch.device(pick_device(device))
        kind = pick_dtype(dtype, place)
        embedded: torch.nn.Module = tiny.model()
        embedded.to(device=place, dtype=torch.float32 if isinstance(kind, str) else kind)
        return Target(cast(PreTrainedModel, embedded), "embedded"), tiny.tokenizer() if tokenizer is None else _tokenizer(tokenizer)
    if isinstance(source, PreTrainedModel):
        name = source.name_or_path
        loaded_tokenizer = _tokenizer(tokenizer) if tokenizer is not None else read_tokenizer(name) if name else None
        return Target(source, name or type(source).__name__), loaded_tokenizer
    if not isinstance(source, str | Path):
        raise ModelError(f"a target is a folder, a hub id or a causal language model of transformers, not {type(source).__name__}")
    check_config(source, trust_remote_code)
    loaded_tokenizer = read_tokenizer(source, trust_remote_code) if tokenizer is None else _tokenizer(tokenizer, trust_remote_code)
    return Target.load(source, dtype, device, trust_remote_code), loaded_tokenizer


def _tokenizer(source: Any, trust_remote_code: bool = False) -> PreTrainedTokenizerBase | None:
    """The tokenizer that the caller names; None for False. ModelError where there is none."""
    if source is False:
        return None
    if isinstance(source, PreTrainedTokenizerBase):
        return source
    if not isinstance(source, str | Path):
        raise ModelError(f"a tokenizer is a folder, a hub id or a tokenizer of transformers, not {type(source).__name__}")
    return read_tokenizer(source, trust_remote_code, required=True)


def _load_drafter(
    target: Target,
    draft: Any,
    method: str | None,
    options: Mapping[str, Any],
    draft_with: str | None,
) -> Drafter:
    """The drafter that `load` asks for; with `draft_with` two, merged."""
    second = None if draft_with is None else drafters.find(draft_with)
    if second is not None and second.needs_weights:
        raise OptionError(f"draft_with takes a method that needs no head, and {draft_with} needs one: name it as the method")
    if isinstance(draft, Drafter):
        _check_ready_drafter(draft, target, method, options if second is None else {})
        return draft if second is None else Merged(draft, _build(second, None, target, options))
    if not isinstance(draft, str | Path | None):
        raise OptionError(f"a draft is a folder, a hub id or a Drafter, not {type(draft).__name__}")
    if method is None:
        format_method = WITHOUT_HEAD if draft is None else checkpoints.load(draft).method
        method = DEFAULT_METHODS.get(format_method, format_method)
    first = drafters.find(method)
    second_options = {name: value for name, value in options.items() if second and _has(second, name) and not _has(first, name)}
    drafter = _build(
        first,
        draft,
        target,
        {name: value for name, value in options.items() if name not in second_options},
    )
    _warn_about_head(drafter, draft, target)
    return drafter if second is None else Merged(drafter, _build(second, None, target, second_options))


def _listed_drafter(target: Target, method: str | None, options: Mapping[str, Any], draft_with: str | None) -> tuple[str | None, Drafter]:
    """(hub id, drafter) of the first listed head for this target that can be read; the default without a head where none is listed.

    Raises:
        CheckpointError: heads are listed, and none of them can be fetched and read.
    """
    reads = None if method is None else drafters.find(method).reads
    heads = [head for head in checkpoints.listed_heads(target.name) if reads in (None, head.method)]
    failures = list[CheckpointError]()
    for head in heads:
        try:
            drafter = _load_drafter(target, head.head, method, options, draft_with)
        except CheckpointError as error:
            failures.append(error)
            continue
        warnings.warn(f"draft auto: took {head.head}, which {head.source} lists for {head.target}", stacklevel=3)
        return head.head, drafter
    if failures:
        rest = f" (and {len(failures) - 1} more listed heads fail)" if len(failures) > 1 else ""
        raise CheckpointError(f"draft auto: {failures[0]}{rest}") from failures[0]
    warnings.warn(f"draft auto: no head is listed for {target.name}; took {method or WITHOUT_HEAD}, which needs none", stacklevel=3)
    return None, _load_drafter(target, None, method, options, draft_with)


def _build(kind: type[Drafter], source: str | Path | None, target: Target, options: Mapping[str, Any]) -> Drafter:
    for name in options:
        if not _has(kind, name):
            known = [*flags(kind.Options, deprecated=False), *LOAD_KEYWORDS]
            raise UnknownOptionError(name, near(name, known))
    return kind.from_pretrained(source, target, build_options(kind.Options, options))


def _has(kind: type[Drafter], option: str) -> bool:
    """True for an option of the method, or one in a group of its options."""
    return option.partition(".")[0] in {f.name for f in fields(kind.Options)}


def _check_ready_drafter(draft: Drafter, target: Target, method: str | None, options: Mapping[str, Any]) -> None:
    if method is not None or options or draft.target.model is not target.model:
        raise OptionError("a Drafter brings its own method, options and target: give it alone, on the target that it was made for")
    if draft.target.draft_weights != target.draft_weights:
        raise OptionError("the precision of a Drafter's weights was chosen when it was made: leave draft_weights out")


def _warn_about_head(drafter: Drafter, draft: str | Path | None, target: Target) -> None:
    if drafter.needs_weights and not target.head_is_exact:
        warnings.warn(
            f"the lm_head of {target.name} does something that eyas does not know: fewer drafts may be accepted",
            stacklevel=4,
        )
    if drafter.target_fingerprint and not target.is_named(drafter.target_fingerprint):
        warnings.warn(
            f"{draft} was trained for another target: the text stays the same, but less of it may be drafted",
            stacklevel=4,
        )


LOAD_KEYWORDS = tuple(name for name in load.__annotations__ if name not in ("options", "return"))


# --- generating -----------------------------------------------------------------------------------


class LLM:
    """A target, a drafter and a tokenizer; and a policy, which learns from everything that is
    decoded here.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        tokenizer: PreTrainedTokenizerBase | None,
        draft_name: str | None = None,
        policy: Policy | None = None,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.tokenizer = tokenizer
        self.draft_name = draft_name
        self.policy = policy
        self.eos = _eos(target.model, tokenizer)
        self._idle: tuple[tuple[object, ...], Decoder] | None = None  # (what it was made of, the Decoder)
        self._grammars: Grammars | None = None

    def __repr__(self) -> str:
        dtype = str(self.target.dtype).removeprefix("torch.")
        tree = "fixed" if self.policy is None else "auto"
        return f"LLM({self._name!r}, method={self.method!r}, tree={tree!r}, dtype={dtype!r}, device={str(self.target.device)!r})"

    @property
    def _name(self) -> str:
        return self.target.name or type(self.target.model).__name__

    @property
    def method(self) -> str:
        """The method's name; "eagle2+suffix" for two."""
        return method_name(self.drafter)

    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        prompt: str,
        *,
        system: str | None = None,
        batch_size: int | None = None,
        **keywords: Unpack[GenerateKeywords],
    ) -> Result: ...
    @overload
    def generate(
        self,
        prompt: Sequence[int] | Messages,
        *,
        system: str | None = None,
        batch_size: int | None = None,
        **keywords: Unpack[GenerateKeywords],
    ) -> Result: ...
    @overload
    def generate(
        self,
        prompt: str | Sequence[int] | Messages,
        *,
        n: int,
        system: str | None = None,
        batch_size: int | None = None,
        **keywords: Unpack[GenerateKeywords],
    ) -> list[Result]: ...
    @overload
    def generate(
        self,
        prompt: Sequence[Prompt],
        *,
        system: str | None = None,
        batch_size: int | None = None,
        **keywords: Unpack[GenerateKeywords],
    ) -> list[Result]: ...
    @overload
    def generate(
        self,
        prompt: Tensor | Mapping[str, Any],
        *,
        system: str | None = None,
        batch_size: int | None = None,
        **keywords: Unpack[GenerateKeywords],
    ) -> Result | list[Result]: ...
    @with_generate_keywords
    def generate(
        self,
        prompt: Any,
        *,
        system: str | None = None,
        batch_size: int | None = None,
        n: int = 1,
        **keywords: Any,
    ) -> Any:
        """Answer one prompt, or each of a list of prompts, once or several times.

        Args:
            prompt: a string, a list of messages, token ids (a list, a tensor [T], or what a
                tokenizer returns), or a list of those (a tensor [B, T]).
            system: a system message, for tokenizers with a chat template.
            batch_size: answers that are decoded together when there are many. None: 1 on a CPU, 8
                elsewhere.
            sampling_params: `SamplingParams` of vLLM, or SGLang's dict (docs/names.md); keywords go before its fields.
            generation_config: `GenerationConfig` of transformers, instead.
            n: answers to each prompt, with the seeds seed, seed + 1, ...; the prompt is read once.
            max_new_tokens: None: 256, or as many as fit the context.
            temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty,
                frequency_penalty, logit_bias, seed: see `Sampling`. Greedy by default. None is the
                default. logit_bias may be a dict, also with strings of digits as keys.
            min_tokens: no token that ends the answer comes before this many others.
            stop_token_ids: further tokens that end the answer.
            logprobs: list the log-probability of every new token, and those of this many most
                probable tokens (0: none): raw, before penalties and temperature. In
                `Result.logprobs`.
            prompt_logprobs: the same for the prompt's tokens. The whole prompt is then read, even
                if its beginning is in a cache.
            stop: a stop string or several. The text ends before it, the ids with the token that
                completes it.
            logits_processor: processors of transformers, one or several. They run once for each
                node, with the node's own prefix, which is slow.
            draft: "auto"; "off": decode plainly; or the most draft tokens to verify per cycle.
            prediction: text (or token ids) that the answer probably repeats, such as the file that
                is to be edited. It is drafted; it changes the speed, never the answer.
            ignore_eos: go on to max_new_tokens.
            raw: take a string as it is, without the chat template.
            response_format, regex, grammar, choice: the texts that the answer may have
                (docs/structured_output.md). response_format is OpenAI's, or a model of pydantic.

        Returns:
            A Result, or a list of them in the order of the prompts. With n above 1 a list of n
            Results takes the place of each.

        Raises:
            InputError, FitError, OptionError: before anything is decoded.
        """
        prompts, single = as_prompts(prompt)
        keywords = with_objects(keywords)
        n = whole_number("n", keywords.pop("n", 1) if n == 1 else n)
        keywords.pop("n", None)
        asked = generate_keywords(keywords)
        seeds = [{**keywords, "seed": (int(asked["seed"]) + k) % 2**63} for k in range(n)] if n > 1 else [keywords]
        answers = [_Answer(*self.request(one, system=system, **each)) for one in prompts for each in seeds]
        results = dict(self._answer_each(answers, batch_size, reuse=n > 1))
        flat = [results[i] for i in range(len(answers))]
        each = flat if n == 1 else [flat[i : i + n] for i in range(0, len(flat), n)]
        return each[0] if single else each

    def generate_each(
        self,
        prompts: Sequence[Prompt],
        batch_size: int | None = None,
        *,
        system: str | None = None,
        **keywords: Unpack[GenerateKeywords],
    ) -> Iterator[tuple[int, Result]]:
        """Yield (index, Result) whenever a prompt is answered, in any order. Parameters as in
        `generate`.
        """
        answers = [_Answer(*self.request(prompt, system=system, **keywords)) for prompt in prompts]
        yield from self._answer_each(answers, batch_size)

    def _answer_each(self, answers: Sequence[_Answer], batch_size: int | None, reuse: bool = False) -> Iterator[tuple[int, Result]]:
        """Decode the answers; yields each, with its number, when it is complete. `reuse`: prompts that begin alike are read once."""
        rows = self._default_rows if batch_size is None else whole_number("batch_size", batch_size)
        decoder, keep = self.take_decoder(max(1, min(rows, len(answers))), reuse)
        index = {decoder.add(answer.request): i for i, answer in enumerate(answers)}
        while not decoder.finished:
            for step in check_steps(decoder.step()):
                i = index[step.request]
                answers[i].add(step)
                if step.finish:
                    yield i, answers[i].result()
        keep()

    @with_generate_keywords
    def stream(
        self,
        prompt: Prompt | Tensor | Mapping[str, Any],
        *,
        system: str | None = None,
        on_step: Callable[[Step], None] | None = None,
        **keywords: Unpack[GenerateKeywords],
    ) -> Stream:
        """Answer one prompt piece by piece, one per cycle. Parameters as in `generate`.

        Closing the stream early leaves everything usable.

        Args:
            on_step: called with the engine's record of each cycle, which then has a `Trace`: the
                tree with its probabilities.
        """
        request, reader = self.request(prompt, system=system, **keywords)
        answer = _Answer(replace(request, trace=on_step is not None), reader)
        decoder, keep = self.take_decoder()
        return Stream(decoder, answer, keep, on_step)

    @with_generate_keywords
    def chat(self, system: str | None = None, **keywords: Unpack[GenerateKeywords]) -> Chat:
        """Begin a conversation whose keys and values are kept from turn to turn.

        Parameters as in `generate`; they hold for every turn.
        """
        return Chat(self, system, keywords)

    def ids(self, prompt: Any, system: str | None = None, raw: bool = False) -> tuple[int, ...]:
        """Token ids of one prompt.

        A string is a user's message where the tokenizer has a chat template, unless `raw`.
        """
        prompts, _ = as_prompts(prompt)
        if len(prompts) != 1:
            raise InputError("the prompt is empty: give at least one token" if not prompts else f"one prompt at a time, not {len(prompts)}")
        one = prompts[0]
        template = not raw and self.tokenizer is not None and bool(getattr(self.tokenizer, "chat_template", None))
        if isinstance(one, tuple):
            if system:
                raise InputError("a system message needs a prompt that goes through the chat template: a string or messages, no token ids")
            return cast(tuple[int, ...], one)
        if self.tokenizer is None:
            raise InputError("this target has no tokenizer: give token ids (--prompt-ids), or name a tokenizer")
        if system and not template:
            raise InputError("a system message needs a chat template: this tokenizer has none, or raw leaves it out")
        if isinstance(one, str):
            if not one.strip():
                raise InputError("the prompt is empty")
            if not template:
                return tuple(encode(self.tokenizer, one))
            one = [{"role": "user", "content": one}]
        head = [{"role": "system", "content": system}] if system else []
        return tuple(render(self.tokenizer, [*head, *cast(Messages, one)]))

    def request(self, prompt: Any, *, system: str | None = None, **keywords: Unpack[GenerateKeywords]) -> tuple[Request, TextReader]:
        """The engine's request for a prompt, and the reader that turns its tokens into text.
        Parameters as in `generate`.
        """
        asked = generate_keywords(keywords)
        ids = self.ids(prompt, system, asked["raw"])
        eos = (frozenset() if asked["ignore_eos"] else self.eos).union(asked["stop_token_ids"])
        reader = TextReader(self.tokenizer, asked["stop"])
        request = Request(
            ids,
            self._new_tokens(asked, len(ids)),
            sampling_of(asked),
            eos,
            reader.feed,
            tuple(check_processor(p) for p in as_processors(asked["logits_processor"])),
            min_tokens=asked["min_tokens"],
            logprobs=asked["logprobs"],
            prompt_logprobs=asked["prompt_logprobs"],
            constraint=self._constraint(asked, eos),
            draft=asked["draft"],
            prediction=self._prediction(asked["prediction"]),
        )
        return request, reader

    def _constraint(self, asked: Mapping[str, Any], eos: Collection[int]) -> Constraint | None:
        """The constraint that the keywords ask for; None where the text is free."""
        structure = structure_of(asked)
        if structure is None:
            return None
        if self._grammars is None:
            self._grammars = Grammars(self.tokenizer, self.target.vocab_size)
        return self._grammars.constraint(structure, eos)

    def _prediction(self, given: str | Sequence[int] | None) -> tuple[int, ...]:
        """Token ids of a predicted text."""
        if given is None or isinstance(given, str):
            if given and self.tokenizer is None:
                raise InputError("this target has no tokenizer: give the prediction as token ids")
            return tuple(encode_part(self.tokenizer, given, "the prediction")) if given and self.tokenizer else ()
        return self.ids(given, raw=True) if len(given) else ()

    def _new_tokens(self, asked: Mapping[str, Any], prompt_length: int) -> int:
        most: int | None = asked["max_new_tokens"]
        if asked.get("max_length") is not None:
            if most is not None:
                raise OptionError("max_length and max_new_tokens say the same: write max_new_tokens only")
            most = whole_number("max_length", asked["max_length"]) - prompt_length
            if most < 1:
                raise OptionError(f"max_length counts the prompt's {prompt_length} tokens too: write max_new_tokens instead")
        return max(1, min(DEFAULT_NEW_TOKENS, self.target.context - prompt_length)) if most is None else most

    @property
    def _default_rows(self) -> int:
        return 1 if self.target.device.type == "cpu" else 8

    def take_decoder(self, rows: int = 1, reuse: bool = False) -> tuple[Decoder, Callable[[], None]]:
        """A Decoder without requests, the one that served last where it suits; and a function that
        lets it serve again.

        Call it when all is well: after an error the rows of a Decoder may hold anything.
        """
        made_of = self.target, self.drafter, self.policy, rows, reuse
        idle, self._idle = self._idle, None
        if idle is None or idle[0] != made_of:
            idle = made_of, Decoder(self.target, adapted(self.drafter, self.policy), rows, reuse)
        decoder = idle[1]

        def keep() -> None:
            if decoder.finished and keeps_well(decoder):
                self._idle = made_of, decoder

        return decoder, keep


class Chat:
    """A conversation. Keys and values of earlier turns are used again, up to the first token that
    differs.
    """

    def __init__(self, llm: LLM, system: str | None, keywords: Mapping[str, Any]) -> None:
        self.llm = llm
        self.keywords = generate_keywords(keywords)
        sampling_of(self.keywords)  # impossible values are refused here
        if system is not None and not isinstance(system, str):
            raise InputError(f"a system message must be a string, not {type(system).__name__}")
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        self._decoder = Decoder(llm.target, adapted(llm.drafter, llm.policy), rows=1, reuse=True)

    def __repr__(self) -> str:
        last = f", last {self.messages[-1]['role']}: {_shortened(self.messages[-1]['content'])!r}" if self.messages else ""
        return f"Chat({self.llm._name!r}, {len(self.messages)} messages{last})"

    @with_generate_keywords
    def send(self, text: str, **keywords: Unpack[GenerateKeywords]) -> Result:
        """Send a user's message; it and the answer join the conversation. Parameters as in
        `LLM.generate`.
        """
        stream = self.stream(text, **keywords)
        for _ in stream:
            pass
        return stream.result()

    @with_generate_keywords
    def stream(self, text: str, **keywords: Unpack[GenerateKeywords]) -> Stream:
        """The same, piece by piece. When the stream is closed early, the text so far joins the
        conversation.
        """
        if not self._decoder.finished:
            raise InputError("the last answer is still being streamed: read it to its end, or close it")
        if not isinstance(text, str) or not text.strip():
            raise InputError("the message is empty" if isinstance(text, str) else f"a message is a string, not {type(text).__name__}")
        asked = generate_keywords(keywords, self.keywords)
        answer = _Answer(*self.llm.request([*self.messages, {"role": "user", "content": text}], **asked))
        return Stream(self._decoder, answer, lambda: self._join(text, answer))

    def _join(self, text: str, answer: _Answer) -> None:
        if answer.totals.token_ids:
            reply = answer.result().text
            self.messages += [
                {"role": "user", "content": text},
                {"role": "assistant", "content": reply},
            ]


class Stream(Iterator[Piece]):
    """An answer that is being decoded, piece by piece."""

    def __init__(
        self,
        decoder: Decoder,
        answer: _Answer,
        at_end: Callable[[], None],
        on_step: Callable[[Step], None] | None = None,
    ) -> None:
        self._decoder = decoder
        self._answer = answer
        self._at_end = at_end
        self._on_step = on_step
        self._pieces = deque[Piece]()
        self._open = False
        self._ticket = decoder.add(answer.request)
        self._open = True

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Piece:
        while not self._pieces:
            if not self._open:
                raise StopIteration
            self._step()
        return self._pieces.popleft()

    def _step(self) -> None:
        try:
            steps = check_steps(self._decoder.step())
        except BaseException:
            self._open = False
            self._decoder.cancel(self._ticket)
            raise
        for step in steps:
            if step.request == self._ticket:
                if self._on_step is not None:
                    self._on_step(step)
                self._pieces.append(self._answer.add(step))
        if self._answer.totals.finish:
            self._open = False
            self._at_end()

    def close(self) -> None:
        """Break the answer off."""
        if self._open:
            self._open = False
            self._decoder.cancel(self._ticket)
            self._at_end()

    def __del__(self) -> None:
        self.close()

    def result(self) -> Result:
        """The answer so far."""
        return self._answer.result()


class TextReader:
    """Reads a request's tokens as text; tells the engine when a stop string is complete."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, stop: str | Sequence[str] | None = None) -> None:
        if tokenizer is None and stop:
            raise InputError("stop strings need a tokenizer, and this target has none")
        self._stops = None if tokenizer is None else StopStrings(tokenizer, stop)
        self.stop_string: str | None = None  # the one that ended the text
        self._taken: list[str] = []
        self._new: list[str] = []

    def feed(self, token: int) -> bool:
        """Read one token; True where it completes a stop string."""
        if self._stops is None:
            return False
        piece = self._stops.feed(token)
        self._new.append(piece.text)
        self.stop_string = piece.hit
        return piece.hit is not None

    def take(self, final: bool = False) -> str:
        """The text since the last call; `final` adds the text that was held back."""
        if final and self._stops is not None:
            self._new.append(self._stops.flush())
        text = "".join(self._new)
        self._new = []
        self._taken.append(text)
        return text

    def text(self) -> str:
        """All text so far, with the text that is held back."""
        tail = "" if self._stops is None else self._stops.tail()
        return "".join([*self._taken, *self._new, tail])


class _Answer:
    """Collects the Steps of one request: text, token ids and figures."""

    def __init__(self, request: Request, reader: TextReader) -> None:
        self.request = request
        self.reader = reader
        self.totals = StepTotals()
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()

    def add(self, step: Step) -> Piece:
        self.totals.add(step)
        self.logprobs += step.logprobs
        self.prompt_logprobs += step.prompt_logprobs
        return Piece(self.reader.take(final=step.finish is not None), step.tokens, step.accepted, step.finish, step.logprobs)

    def result(self) -> Result:
        """The answer so far; one that was broken off counts as ended by its length."""
        totals = self.totals
        stats = Stats.of(totals, self.request.processors)
        logprobs = None if self.request.logprobs is None else tuple(self.logprobs)
        prompt_logprobs = None if self.request.prompt_logprobs is None else self.prompt_logprobs
        return Result(self.reader.text(), tuple(totals.token_ids), totals.finish or "length", stats, logprobs, prompt_logprobs)


def sampling_of(asked: Mapping[str, Any]) -> Sampling:
    """The Sampling among the keywords of `generate`; OptionError for impossible values."""
    return Sampling(**{f.name: plain_number(asked[f.name]) for f in fields(Sampling)})


def _eos(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """Token ids that end an answer, as transformers finds them: generation config, else model
    config, else tokenizer.
    """
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            listed = list(ids) if isinstance(ids, list | tuple) else [ids]
            if not all(isinstance(token, int) for token in listed):
                raise ModelError(f"eos_token_id must be a token id or a list of them, and it is {ids!r} in {type(source).__name__}")
            return frozenset(listed)
    return frozenset()


def check_processor(processor: Processor) -> Processor:
    """The processor; InputError for one that cannot be asked about every node of a tree."""
    name = type(processor).__name__
    if STATEFUL & {kind.__name__ for kind in type(processor).__mro__}:
        raise InputError(f"{name} keeps a memory, and in a tree it would see tokens that are never emitted: decode without it")
    if isinstance(processor, type) or not callable(processor):
        raise InputError(f"logits_processor must hold callables (ids, scores) -> scores, got {processor!r}")
    return processor
