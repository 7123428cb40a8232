"""Load a target and a drafter; generate, stream, chat. All three are folds over `Decoder.step`.

    llm = eyas.load("meta-llama/Llama-3.1-8B-Instruct", draft="path/or/hub-id")
    llm.generate("Why is the sky blue?").text

This module knows prompts, tokenizers and results; it knows no method, no tree and no family.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, cast, overload

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from eyas import checkpoints, drafters, metrics, runners, tiny
from eyas.adaptive import auto, mode_of
from eyas.core.drafter import build_options
from eyas.core.engine import Decoder, Policy, Processor, Request, Step
from eyas.core.sampling import Sampling
from eyas.core.target import Target, pick_device, pick_dtype
from eyas.drafters import Drafter
from eyas.drafters._merge import Merged, method_name
from eyas.errors import InputError, ModelError, OptionError, near
from eyas.text import StopStrings, encode, render

__all__ = ["LLM", "Chat", "Piece", "Prompt", "Result", "Stats", "load"]

Messages = Sequence[Mapping[str, Any]]
Prompt = str | Messages | Sequence[int]

DEFAULT_NEW_TOKENS = 256

# Processors of Hugging Face that remember what they saw: on a tree they would see tokens that never come to be.
STATEFUL = frozenset(
    {
        "AlternatingCodebooksLogitsProcessor", "ClassifierFreeGuidanceLogitsProcessor", "DiaClassifierFreeGuidanceLogitsProcessor",
        "DiaEOSDelayPatternLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor", "UnbatchedClassifierFreeGuidanceLogitsProcessor",
        "WhisperNoSpeechDetection", "WhisperTimeStampLogitsProcessor",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Stats:
    """What decoding one prompt took."""

    cycles: int  # forwards of the target after the prompt's own
    accepted_lengths: tuple[int, ...]  # drafted tokens that each cycle kept, after cutting, without the bonus
    seconds: float  # from the prompt to the last token
    prefill_seconds: float  # of that, the prompt's pass and the first token
    slow_processors: tuple[str, ...] = ()  # processors that had to run node by node

    tokens: int = 0  # emitted by cycles (the prefill's own token not counted)
    decisions: Mapping[str, int] = field(default_factory=dict)  # cycles by what the policy decided: `Step.decided`

    @property
    def tau(self) -> float:
        """Tokens emitted per cycle, the bonus included; 0 without cycles."""
        return metrics.tau(self.tokens, self.cycles)

    @property
    def tokens_per_second(self) -> float:
        """Of decoding: tokens emitted by cycles over the seconds after the prefill; 0 without cycles."""
        return metrics.tokens_per_second(self.tokens, self.seconds - self.prefill_seconds)


@dataclass(frozen=True)
class Result:
    """An answer."""

    text: str  # special tokens skipped, a stop string removed
    token_ids: tuple[int, ...]  # the new tokens, up to the one that ended the text (an EOS included)
    finish_reason: str  # "stop" | "length"
    stats: Stats


@dataclass(frozen=True)
class Piece:
    """What one cycle added to a streamed answer."""

    text: str  # may be empty while characters are incomplete or might become a stop string
    token_ids: tuple[int, ...]
    accepted: int  # how many of those tokens were drafted
    finish_reason: str | None  # set in the last piece


def load(
    target: str | Path | PreTrainedModel | None = None,
    draft: str | Path | Drafter | None = None,
    method: str | None = None,
    *,
    draft_with: str | None = None,
    tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    kernels: str = "auto",
    weights: str = "exact",
    activations: str = "exact",
    draft_weights: str = "exact",
    **options: Any,
) -> LLM:
    """A target with a drafter, ready to generate.

    Args:
        target: local folder, hub id or a model that is already loaded (used as it is); None = the embedded model with its own head.
        draft: the head's local folder or hub id, or a Drafter.
        method: a name of `eyas methods` or a dotted path; default: what the head was made for; without a head `suffix`.
        draft_with: a second method, one that needs no head, whose tree is merged with the first one's in every cycle.
        tokenizer: where it is not the target's own.
        dtype, device: "auto" = float32 on a CPU; on an accelerator the checkpoint's own dtype.
        kernels: "auto" = on a CPU compiled kernels where they know the model, its own forward elsewhere; "on" says why not; "off".
            On a GPU "on" = CUDA graphs; "compile" = with layers by torch.compile.
        weights: "exact" = the target's as they are; "bfloat16", "int8", "int4" = rounded, by the kernels: a target of its own, and
            faster where that is fewer bytes.
        activations: what weights are multiplied by: "exact" = as exact as float32; rounded, by the kernels, so that larger trees pay and
            prompts are read faster, as a target of its own: "bfloat16" (weights kept so), "int16", "int8" (weights kept as int8 or int4).
        draft_weights: "fp8" = the head's rounded, on GPUs that multiply it; "int4" = by the kernels: changes what is guessed, never what is
            said.
        options: the method's own, e.g. tree={"nodes": 32, "depth": 5}; those that only the second method knows are its.
            tree="auto": drafts are as large as pays on this machine, or none (`eyas.adaptive`): the default, unless a tree is described.
            tree="fixed": as the options say, in every cycle.

    Raises:
        ModelError, CheckpointError, OptionError: one line that says what is wrong and what to do.
    """
    words: PreTrainedTokenizerBase | None
    mode, options = ("fixed", options) if isinstance(draft, Drafter) and "tree" not in options else mode_of(options)
    if target is None:
        place = torch.device(pick_device(device))
        kind = pick_dtype(dtype, place)
        embedded: torch.nn.Module = tiny.model()
        embedded.to(device=place, dtype=torch.float32 if isinstance(kind, str) else kind)
        model = Target(cast(PreTrainedModel, embedded), "embedded")
        words = tiny.tokenizer() if tokenizer is None else _tokenizer(tokenizer, must=True)
        method = method or (tiny.BEST if draft is None else None)
        draft = tiny.HEADS.get(drafters.find(method).reads) if draft is None and method else draft
    elif isinstance(target, PreTrainedModel):
        source = tokenizer or target.name_or_path
        words = _tokenizer(source, must=tokenizer is not None) if source else None
        model = Target(target, target.name_or_path or type(target).__name__)
    else:
        _check_folder(target)
        words = _tokenizer(tokenizer or target, tokenizer is not None, trust_remote_code)
        model = Target.load(target, dtype, device, trust_remote_code)
    own = not isinstance(target, PreTrainedModel)
    model = runners.prepared(model, kernels, own=own, weights=weights, activations=activations, draft_weights=draft_weights)
    drafter = _drafter(model, draft, method, options, draft_with)
    policy = auto(drafter) if mode == "auto" else None
    return LLM(model, drafter, words, str(draft) if isinstance(draft, str | Path) else None, policy)


def _check_folder(target: str | Path) -> None:
    path = Path(target)
    if path.is_dir() and not (path / "config.json").exists():
        raise ModelError(f"target folder {str(target)!r} has no config.json: name a folder in Hugging Face layout")
    if not path.exists() and (path.is_absolute() or str(target).startswith((".", "~")) or str(target).count("/") > 1):
        raise ModelError(f"target {str(target)!r} does not exist")
    if path.is_file():
        raise ModelError(f"target {str(target)!r} is a file: name the folder that holds it and its config.json")


def _tokenizer(
    source: str | Path | PreTrainedTokenizerBase, must: bool = False, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase | None:
    """None when the target's folder holds no tokenizer (token ids then still work)."""
    if isinstance(source, PreTrainedTokenizerBase):
        return source
    try:
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(source), trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if must:
            raise ModelError(f"tokenizer {str(source)!r} cannot be loaded: {' '.join(str(error).split())[:200]}") from error
        return None
    return found if len(found) else None


DEFAULT_METHODS = {"eagle1": "eagle2"}  # the best method for a head of this form
WITHOUT_HEAD = "suffix"


def _drafter(
    target: Target, draft: str | Path | Drafter | None, method: str | None, options: Mapping[str, Any], draft_with: str | None
) -> Drafter:  # fmt: skip
    beside = None if draft_with is None else drafters.find(draft_with)
    if beside is not None and beside.needs_weights:
        raise OptionError(f"draft_with takes a method that needs no head, and {draft_with} needs one: name it as the first method")
    if isinstance(draft, Drafter):
        if method is not None or (options and not beside) or draft.target.model is not target.model:
            raise OptionError("a Drafter brings its own method, options and target: give it alone, on the target that it was made for")
        if draft.target.draft_weights != target.draft_weights:
            raise OptionError("a Drafter's weights were chosen when it was made: leave draft_weights out")
        return draft if beside is None else Merged(draft, beside.from_pretrained(None, target, build_options(beside.Options, options)))
    held = checkpoints.load(draft).method if draft is not None and method is None else WITHOUT_HEAD
    kind = drafters.find(method or DEFAULT_METHODS.get(held, held))
    theirs = {} if beside is None else {name: options[name] for name in options if _knows(beside, name) and not _knows(kind, name)}
    mine = {name: options[name] for name in options if name not in theirs}
    drafter = kind.from_pretrained(draft, target, build_options(kind.Options, mine))
    if kind.needs_weights and not target.head_is_exact:
        warnings.warn(f"the head of {target.name} does something that eyas does not know: drafts may be accepted less", stacklevel=3)
    if drafter.target_fingerprint and not target.is_named(drafter.target_fingerprint):
        warnings.warn(f"{draft} was trained for another target: the text stays the same, but less of it may be drafted", stacklevel=3)
    return drafter if beside is None else Merged(drafter, beside.from_pretrained(None, target, build_options(beside.Options, theirs)))


def _knows(kind: type[Drafter], option: str) -> bool:
    """Whether a method has that option, or its group."""
    return option.partition(".")[0] in {f.name for f in fields(kind.Options)}


class LLM:
    """A target, a drafter and a tokenizer; and a policy, which learns from everything that is decoded here."""

    def __init__(
        self, target: Target, drafter: Drafter, tokenizer: PreTrainedTokenizerBase | None, draft_name: str | None = None,
        policy: Policy | None = None,
    ) -> None:  # fmt: skip
        self.target, self.drafter, self.tokenizer, self.draft_name, self.policy = target, drafter, tokenizer, draft_name, policy
        self.eos = _eos(target.model, tokenizer)
        self._idle: Decoder | None = None

    @contextmanager
    def _decoder(self, rows: int = 1) -> Iterator[Decoder]:
        """Its rows are empty; one that lasts serves again."""
        idle, self._idle = self._idle, None
        if idle is None or not idle.serves(self.target, self.drafter, rows, self.policy):
            idle = Decoder(self.target, self.drafter, rows, policy=self.policy)
        try:
            yield idle
        except GeneratorExit:  # a stream that is broken off has cancelled its request; after an error rows may hold anything
            self._idle = idle if idle.finished and idle.lasts else None
            raise
        self._idle = idle if idle.finished and idle.lasts else None

    @property
    def method(self) -> str:
        return method_name(self.drafter)

    def ids(self, prompt: Prompt, system: str | None = None, raw: bool = False) -> tuple[int, ...]:
        """Token ids of a prompt: a string (a user's message where the tokenizer has a chat template, unless `raw`), messages, or ids."""
        chat = not raw and self.tokenizer is not None and bool(getattr(self.tokenizer, "chat_template", None))
        if system and (not chat or not (isinstance(prompt, str) or all(isinstance(x, Mapping) for x in prompt))):
            raise InputError("a system message needs a chat template and a prompt that goes through it (no ids, not raw)")
        if not isinstance(prompt, str) and all(isinstance(x, int) and not isinstance(x, bool) for x in prompt):
            if not prompt:
                raise InputError("the prompt is empty: give at least one token")
            return tuple(prompt)  # type: ignore[arg-type]
        if self.tokenizer is None:
            raise InputError("this target has no tokenizer: give token ids (--prompt-ids), or name a tokenizer")
        if isinstance(prompt, str):
            if not prompt.strip():
                raise InputError("the prompt is empty")
            if not chat:
                return tuple(encode(self.tokenizer, prompt))
            prompt = [{"role": "user", "content": prompt}]
        head = [{"role": "system", "content": system}] if system else []
        return tuple(render(self.tokenizer, [*head, *prompt]))

    def request(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        logits_processor: Iterable[Processor] = (),
        ignore_eos: bool = False,
        system: str | None = None,
        raw: bool = False,
        **sampling: Any,
    ) -> tuple[Request, _Reader]:
        """The request for a Decoder, and what reads its tokens as text."""
        ids = self.ids(prompt, system, raw)
        room = max(1, self.target.context - len(ids))
        try:
            law = Sampling(**sampling)
        except TypeError as error:
            known = {f.name for f in fields(Sampling)}
            name = next(iter(sampling.keys() - known), "")
            raise InputError(f"unknown sampling parameter {name!r}; {near(name, known)}") from error
        reader = _Reader(self.tokenizer, stop)
        processors = tuple(_check_processor(p) for p in logits_processor)
        new = min(DEFAULT_NEW_TOKENS, room) if max_new_tokens is None else max_new_tokens
        return Request(ids, new, law, frozenset() if ignore_eos else self.eos, reader.feed, processors), reader

    @overload
    def generate(self, prompt: str, **kwargs: Any) -> Result: ...
    @overload
    def generate(self, prompt: Sequence[int] | Messages, **kwargs: Any) -> Result: ...
    @overload
    def generate(self, prompt: Sequence[Prompt], **kwargs: Any) -> list[Result]: ...
    def generate(self, prompt: Any, **kwargs: Any) -> Any:
        """Answer one prompt, or each of a list of prompts.

        Args:
            prompt: a string, a list of messages, a list of token ids; or a list of those.
            max_new_tokens: default 256, or what fits the context.
            temperature, top_k, top_p, min_p, repetition_penalty, seed: see `Sampling`. Greedy by default.
            stop: stop strings; the text ends before, the ids with the token that completes one.
            logits_processor: Hugging Face processors; run once per node with its own prefix, so they cost time.
            ignore_eos: go on to max_new_tokens.
            system, raw: a system message; take a string as it is, without the chat template.
            batch_size: rows decoded together when there are many prompts (default 1 on a CPU, 8 elsewhere).

        Raises:
            InputError, FitError, OptionError: before anything runs.
        """
        if _is_one(prompt):
            return next(iter(self.generate_each([prompt], **kwargs)))[1]
        return [result for _, result in sorted(self.generate_each(prompt, **kwargs), key=lambda pair: pair[0])]

    def generate_each(self, prompts: Sequence[Prompt], batch_size: int | None = None, **kwargs: Any) -> Iterator[tuple[int, Result]]:
        """(index, Result) as prompts are finished, in whatever order."""
        made = [self.request(p, **kwargs) for p in prompts]
        rows = batch_size or (1 if self.target.device.type == "cpu" else 8)
        with self._decoder(max(1, min(rows, len(made)))) as decoder:
            index = {decoder.add(request): i for i, (request, _) in enumerate(made)}
            ledgers = [_Ledger(request, reader) for request, reader in made]
            while not decoder.finished:
                for step in decoder.step():
                    ledger = ledgers[index[step.request]]
                    ledger.add(step)
                    if step.finish:
                        yield index[step.request], ledger.result()

    def stream(self, prompt: Prompt, **kwargs: Any) -> Iterator[Piece]:
        """The answer piece by piece, one per cycle; closing the iterator early leaves everything reusable."""
        request, reader = self.request(prompt, **kwargs)
        with self._decoder() as decoder:
            yield from _stream(decoder, request, reader)

    def chat(self, system: str | None = None, **defaults: Any) -> Chat:
        """A conversation whose keys and values are kept from turn to turn."""
        return Chat(self, system, defaults)


class Chat:
    """A conversation. What earlier turns left in the caches is used again, up to the first token that differs."""

    def __init__(self, llm: LLM, system: str | None, defaults: Mapping[str, Any]) -> None:
        self.llm, self.defaults = llm, dict(defaults)
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        self._decoder = Decoder(llm.target, llm.drafter, rows=1, reuse=True, policy=llm.policy)

    def send(self, text: str, **kwargs: Any) -> Result:
        """Say something; the answer joins the conversation."""
        request, reader = self._request(text, kwargs)
        ledger = _Ledger(request, reader)
        for _ in _stream(self._decoder, request, reader, ledger):
            pass
        return self._answered(text, ledger)

    def stream(self, text: str, **kwargs: Any) -> Iterator[Piece]:
        """The same, piece by piece. When it is closed early, what was said so far joins the conversation."""
        request, reader = self._request(text, kwargs)
        ledger = _Ledger(request, reader)
        try:
            yield from _stream(self._decoder, request, reader, ledger)
        finally:
            if ledger.totals.token_ids:
                self._answered(text, ledger)

    def _request(self, text: str, kwargs: Mapping[str, Any]) -> tuple[Request, _Reader]:
        if not self._decoder.finished:
            raise InputError("the last answer is still being streamed: read it to its end, or close it")
        if not text.strip():
            raise InputError("the message is empty")
        return self.llm.request([*self.messages, {"role": "user", "content": text}], **{**self.defaults, **kwargs})

    def _answered(self, text: str, ledger: _Ledger) -> Result:
        result = ledger.result()
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": result.text}]
        return result


def _stream(decoder: Decoder, request: Request, reader: _Reader, ledger: _Ledger | None = None) -> Iterator[Piece]:
    ticket = decoder.add(request)
    done = False
    try:
        while not decoder.finished:
            for step in decoder.step():
                if step.request != ticket:  # another turn was begun before this one was read to its end
                    continue
                if ledger is not None:
                    ledger.add(step)
                text = reader.take(final=step.finish is not None)
                done = step.finish is not None
                yield Piece(text, step.tokens, step.accepted, step.finish)
    finally:
        if not done:
            decoder.cancel(ticket)


class _Reader:
    """Reads a request's tokens as text; tells the Decoder when a stop string is complete."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, stop: str | Sequence[str]) -> None:
        if tokenizer is None and stop:
            raise InputError("stop strings need a tokenizer, and this target has none")
        self._stops = None if tokenizer is None else StopStrings(tokenizer, [stop] if isinstance(stop, str) else list(stop))
        self._parts: list[str] = []
        self._new: list[str] = []

    def feed(self, token: int) -> bool:
        if self._stops is None:
            return False
        piece = self._stops.feed(token)
        self._new.append(piece.text)
        return piece.hit is not None

    def take(self, final: bool = False) -> str:
        """The text since the last call; `final` gives out what was held back."""
        if final and self._stops is not None:
            self._new.append(self._stops.flush())
        text = "".join(self._new)
        self._new = []
        self._parts.append(text)
        return text

    def text(self) -> str:
        return "".join([*self._parts, *self._new])


@dataclass
class _Ledger:
    """The steps of one request, added up."""

    request: Request
    reader: _Reader
    totals: metrics.StepTotals = field(default_factory=metrics.StepTotals)

    def add(self, step: Step) -> None:
        self.totals.add(step)

    def result(self) -> Result:
        """What stands so far; a request that was cut off from outside counts as ended by length."""
        self.reader.take(final=True)
        slow = tuple(type(p).__name__ for p in self.request.processors)
        totals = self.totals
        stats = Stats(
            totals.cycles, tuple(totals.accepted_lengths), totals.seconds, totals.prefill_seconds, slow, totals.emitted, totals.decisions
        )
        return Result(self.reader.text(), tuple(totals.token_ids), totals.finish or "length", stats)


def _is_one(prompt: Any) -> bool:
    """A string, a list of messages, or a list of ids; anything else is a list of prompts."""
    if isinstance(prompt, str):
        return True
    if not isinstance(prompt, Sequence):
        raise InputError(f"a prompt is a string, a list of messages or a list of token ids, not {type(prompt).__name__}")
    return all(isinstance(x, int) for x in prompt) or all(isinstance(x, Mapping) for x in prompt)


def _eos(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """As generate does: the generation config's ids, else the model's, else the tokenizer's."""
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        found = getattr(source, "eos_token_id", None)
        if found is not None:
            return frozenset([found] if isinstance(found, int) else found)
    return frozenset()


def _check_processor(processor: Processor) -> Processor:
    name = type(processor).__name__
    if STATEFUL & {kind.__name__ for kind in type(processor).__mro__}:
        raise InputError(f"{name} remembers what it saw, and on a tree it would see tokens that never come to be: decode without it")
    if isinstance(processor, type) or not callable(processor):
        raise InputError(f"logits_processor must hold callables (ids, scores) -> scores, got {processor!r}")
    return processor
