"""A target with a drafter, ready to generate; and conversations with it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, Unpack, cast, overload

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eyas.api._results import Answer, Result, Stream, TextReader, shorten
from eyas.arguments import (
    STRUCTURE_KEYWORDS,
    GenerateKeywords,
    Keywords,
    MediaIds,
    Messages,
    Prompt,
    as_processors,
    as_prompts,
    generate_keywords,
    has_media,
    plain_number,
    request_features,
    whole_number,
    with_generate_keywords,
)
from eyas.core.cycle import is_worth_keeping
from eyas.core.dormant import Policy, with_policy
from eyas.core.drafter import Drafter, method_name
from eyas.core.engine import Decoder, Request, Step
from eyas.core.families import BACKENDS
from eyas.core.features import Constraint
from eyas.core.requests import RequestFeature, check_steps
from eyas.core.sampling import Sampling
from eyas.core.sockets import FEATURE, POLICY, STRUCTURE, TARGET, Structures
from eyas.core.target import Target
from eyas.errors import InputError, ModelError, OptionError
from eyas.targets.loading import version_of
from eyas.targets.pretrained import BASE
from eyas.text import encode, encode_part, has_place_for_tools, render, reply_message, template_keywords

DEFAULT_NEW_TOKENS = 256
FEATURE_KEYWORDS = ("logits_processor", "prediction", "logprobs", "prompt_logprobs", *STRUCTURE_KEYWORDS)


class LLM:
    """A target, a drafter and a tokenizer; and a policy, which learns from everything that this LLM decodes. Threads
    may share it: they use the model by turns, a cycle at a time."""

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
        self._views: dict[str, tuple[Target, Drafter, Policy | None]] = {target.adapter: (target, drafter, policy)}
        self._made, self._layers = version_of(target.model), tuple(target.family.layers)
        self._idle: tuple[tuple[object, ...], Decoder] | None = None  # (decoder_key, Decoder)
        self._structures: Structures | None = None  # made when a request first asks for one

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

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the adapters that a request may ask for."""
        return () if self.target.adapters is None else self.target.adapters.names

    @property
    def own_heads(self) -> dict[str, str]:
        """Heads that come with the target, by the kind of head that a method reads."""
        known = (head for plug in TARGET.plugs for head in plug.heads_for(self.target))
        return {head.method: head.head for head in known if not head.listed}

    def view(self, adapter: str) -> tuple[Target, Drafter, Policy | None]:
        """Return target, drafter and policy of the requests for one adapter; "": for none."""
        with self.target.turn:
            if adapter not in self._views:
                target = self.target.with_adapter(adapter)
                drafter = self.drafter.for_target(target)
                self._views[adapter] = target, drafter, None if self.policy is None else new_policy(drafter)
            return self._views[adapter]

    def adapter_named(self, name: str | None) -> str:
        """Return the adapter that a request names; None: the target's own. Raise OptionError for an unknown name."""
        if name is None:
            return self.target.adapter
        return self.target.with_adapter("" if name == BASE else str(name)).adapter

    @overload
    def generate(  # type: ignore[overload-overlap]
        self, prompt: str | Sequence[int] | Messages, *, system: str | None = None, batch_size: int | None = None,
        **keywords: Unpack[GenerateKeywords],
    ) -> Result: ...  # fmt: skip
    @overload
    def generate(
        self, prompt: str | Sequence[int] | Messages, *, n: int, system: str | None = None, batch_size: int | None = None,
        **keywords: Unpack[GenerateKeywords],
    ) -> list[Result]: ...  # fmt: skip
    @overload
    def generate(
        self, prompt: Sequence[Prompt], *, system: str | None = None, batch_size: int | None = None,
        **keywords: Unpack[GenerateKeywords],
    ) -> list[Result]: ...  # fmt: skip
    @overload
    def generate(
        self, prompt: Tensor | Mapping[str, Any], *, system: str | None = None, batch_size: int | None = None,
        **keywords: Unpack[GenerateKeywords],
    ) -> Result | list[Result]: ...  # fmt: skip
    @with_generate_keywords
    def generate(
        self, prompt: Any, *, system: str | None = None, batch_size: int | None = None, n: int = 1, **keywords: Any
    ) -> Any:
        """Answer one prompt, or each of a list of prompts, once or several times.

        Args:
            prompt: a string, a list of messages, token ids (a list, a tensor [T], or the output of a
                tokenizer), or a list of those (a tensor [B, T]). With images: messages with image parts, or the
                output of the target's processor for one prompt (docs/guide/models.md).
            system: a system message, for tokenizers with a chat template.
            batch_size: answers that are decoded together when there are many. None: 1 on a CPU, 8
                elsewhere.
            n: answers to each prompt, with the seeds seed, seed + 1, ...; the prompt is read once.
            max_new_tokens: most tokens of the answer. None is 256, or as many as fit the context.
            temperature, top_k, top_p, min_p, seed: see `Sampling`, whose defaults (greedy decoding) None stands for. Of the
                model's generation_config.json only the end tokens count.
            repetition_penalty, presence_penalty, frequency_penalty, logit_bias: see `Sampling`. logit_bias may be a
                dict, also with strings of digits as keys.
            min_tokens: no token that ends the answer comes before this many others.
            stop_token_ids: further tokens that end the answer.
            logprobs: with N, `Result.logprobs` lists log-probabilities: of every new token and of the N most
                probable tokens. They come from the raw logits, without penalties and temperature. 0 lists the
                token's own only.
            prompt_logprobs: the same for the prompt's tokens. The whole prompt is then read, even if its beginning is
                in a cache.
            stop: one stop string or several. `text` ends before the stop string; `token_ids` includes the token that
                completed it.
            logits_processor: processors of transformers, one or several. They run once for each node of a draft tree,
                with the node's own prefix, which is slow.
            drafting: "auto" lets the drafter and the policy decide, "off" decodes without drafts. A number
                limits the draft tokens that are verified per cycle.
            adapter: the name of the adapter to answer with, where several were loaded; "base" is the model without
                any. None is the same, or for a PeftModel the adapter that was active when it was loaded.
            prediction: text (or token ids) that the answer probably repeats, such as the file that
                is to be edited. It is drafted; it changes the speed, never the answer.
            features: further wishes of the request, each a `core.requests.RequestFeature`, such as
                `eyas.recall.Recalled` or one of your own.
            ignore_eos: go on to max_new_tokens, past tokens that end an answer.
            raw: take a string as it is, without the chat template. A BOS that it begins with is not added again.
            tools: functions that the model may call, in OpenAI's form, for the chat template.
            chat_template_kwargs: variables of the chat template, such as enable_thinking.
            response_format, regex, grammar, choice: the texts that the answer may have
                (docs/guide/structured_output.md). response_format is OpenAI's, or a model of pydantic.

        Returns:
            A Result, or a list of them in the order of the prompts. With n above 1 a list of n
            Results takes the place of each.

        Raises:
            InputError, FitError, OptionError: before anything is decoded.
        """
        prompts, single = as_prompts(prompt)
        n = whole_number("n", n)
        params = generate_keywords(keywords)
        variants = [{**params, "seed": (int(params["seed"]) + k) % 2**63} for k in range(n)] if n > 1 else [params]
        answers = [Answer(*self._request(one, system, each)) for one in prompts for each in variants]
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
        """Yield (index, Result) whenever a prompt is answered, in any order. `generate` explains the parameters."""
        params = generate_keywords(keywords)
        answers = [Answer(*self._request(_single(prompt), system, params)) for prompt in prompts]
        yield from self._answer_each(answers, batch_size)

    def _answer_each(
        self, answers: Sequence[Answer], batch_size: int | None, reuse: bool = False
    ) -> Iterator[tuple[int, Result]]:
        """Decode the answers; yields each, with its number, when complete. `reuse`: read equal beginnings once."""
        usual = 1 if self.target.device.type == "cpu" else 8
        rows = usual if batch_size is None else whole_number("batch_size", batch_size)
        if not answers:
            return
        decoder, give_back = self.take_decoder(max(1, min(rows, len(answers))), reuse, answers[0].request.adapter)
        index = {decoder.add(answer.request): i for i, answer in enumerate(answers)}
        while not decoder.finished:
            for step in check_steps(decoder.step()):
                i = index[step.request_id]
                answers[i].add(step)
                if step.finish:
                    yield i, answers[i].result()
        give_back()

    @with_generate_keywords
    def stream(
        self,
        prompt: Prompt | Tensor | Mapping[str, Any],
        *,
        system: str | None = None,
        on_step: Callable[[Step], None] | None = None,
        **keywords: Unpack[GenerateKeywords],
    ) -> Stream:
        """Answer one prompt piece by piece, one per cycle. `generate` explains the parameters.

        Closing the stream early leaves everything usable.

        Args:
            on_step: called with the engine's record of each cycle, which then has a `Trace`: the
                tree with its probabilities.
        """
        request, reader = self.request(prompt, system=system, **keywords)
        if on_step is not None:
            request = FEATURE.plug_for("on_step").traced(request)
        answer = Answer(request, reader)
        decoder, give_back = self.take_decoder(adapter=request.adapter)
        return Stream(decoder, answer, give_back, on_step)

    @with_generate_keywords
    def chat(self, system: str | None = None, **keywords: Unpack[GenerateKeywords]) -> Chat:
        """Begin a conversation whose keys and values are kept from turn to turn.

        `generate` explains the parameters, which hold for every turn.
        """
        return Chat(self, system, keywords)

    def ids(self, prompt: Any, system: str | None = None, raw: bool = False, **template: Any) -> tuple[int, ...]:
        """Return the token ids of one prompt.

        A string is a user's message where the tokenizer has a chat template, unless `raw`.
        `template`: `tools` and `chat_template_kwargs`, for it.
        """
        return self._ids(_single(prompt), system, raw, **template)

    def _ids(self, prompt: Prompt, system: str | None = None, raw: bool = False, **template: Any) -> tuple[int, ...]:
        one = prompt.ids if isinstance(prompt, MediaIds) else prompt
        has_template = not raw and self.tokenizer is not None and bool(getattr(self.tokenizer, "chat_template", None))
        extra = "a system message needs" if system else f"{min(template)} need" if template else ""
        if isinstance(one, tuple):
            if extra:
                raise InputError(
                    f"{extra} a prompt that goes through the chat template: a string or messages, no token ids"
                )
            return cast(tuple[int, ...], one)
        if self.tokenizer is None:
            raise InputError("this target has no tokenizer: give token ids (--prompt-ids), or --tokenizer")
        if extra and not has_template:
            raise InputError(f"{extra} a chat template: this tokenizer has none, or raw leaves it out")
        if template.get("tools") and not has_place_for_tools(self.tokenizer, template["tools"]):
            raise InputError("this tokenizer's chat template has no place for tools: leave them out")
        if isinstance(one, str):
            if not one.strip():
                raise InputError("the prompt is empty")
            if not has_template:
                return tuple(encode(self.tokenizer, one))
            one = [{"role": "user", "content": one}]
        head = [{"role": "system", "content": system}] if system else []
        return tuple(render(self.tokenizer, [*head, *cast(Messages, one)], **template))

    def request(
        self, prompt: Any, *, system: str | None = None, **keywords: Unpack[GenerateKeywords]
    ) -> tuple[Request, TextReader]:
        """Return the engine's request for a prompt, and the reader that turns its tokens into text."""
        params = generate_keywords(keywords)
        return self._request(_single(prompt), system, params)

    def _request(self, prompt: Prompt, system: str | None, params: Keywords) -> tuple[Request, TextReader]:
        """Return the result of `request`, for a prompt of `as_prompts` and all keywords."""
        template = template_keywords(params)
        if has_media(prompt):
            head = [{"role": "system", "content": [{"type": "text", "text": system}]}] if system else []
            prompt = self.media_prompt([*head, *cast(Messages, prompt)], **template)
        ids = self._ids(prompt, system, params["raw"], **({} if isinstance(prompt, MediaIds) else template))
        eos = (frozenset() if params["ignore_eos"] else self.eos).union(params["stop_token_ids"])
        reader = TextReader(self.tokenizer, params["stop"])
        request = Request(
            ids,
            self._new_tokens(params, len(ids)),
            sampling_of(params),
            eos,
            reader.feed,
            min_tokens=params["min_tokens"],
            drafting=params["drafting"],
            adapter=self.adapter_named(params["adapter"]),
            features=self._features(params, eos),
            media=prompt.media if isinstance(prompt, MediaIds) else None,
            stops_after=reader.stops_after,
        )
        return request, reader

    def media_prompt(self, messages: Messages, **template: Any) -> MediaIds:
        """Return the prompt that the target's processor makes of messages with images. Keywords as in `text.render`."""
        from eyas.api._media import media_prompt

        return media_prompt(messages, self.target.model, **template)

    def _features(self, params: Keywords, eos: Collection[int]) -> tuple[RequestFeature, ...]:
        given = request_features(params["features"])
        asked = [name for name in FEATURE_KEYWORDS if params[name] is not None]
        if not asked:
            return given
        processors = tuple(as_processors(params["logits_processor"]))
        constraint, prediction = self._constraint(params, eos), self._prediction(params["prediction"])
        made = FEATURE.plug_for(" and ".join(asked)).features(params, processors, constraint, prediction)
        return (*made, *given)

    def _constraint(self, params: Keywords, eos: Collection[int]) -> Constraint | None:
        """Return the constraint that the keywords ask for; None where the text is free."""
        asked = {name: params[name] for name in STRUCTURE_KEYWORDS if params[name] is not None}
        if not asked:
            return None
        plug = STRUCTURE.plug_for(" and ".join(asked))
        structure = plug.structure_of(asked)
        if structure is None:
            return None
        with self.target.turn:
            self._structures = self._structures or plug.Grammars(self.tokenizer, self.target.vocab_size)
        return self._structures.constraint(structure, eos)

    def _prediction(self, given: str | Sequence[int] | None) -> tuple[int, ...]:
        if given is None or isinstance(given, str):
            if given and self.tokenizer is None:
                raise InputError("this target has no tokenizer: give the prediction as token ids")
            return tuple(encode_part(self.tokenizer, given, "the prediction")) if given and self.tokenizer else ()
        return self.ids(given, raw=True) if len(given) else ()

    def _new_tokens(self, params: Keywords, prompt_length: int) -> int:
        max_new_tokens: int | None = params["max_new_tokens"]
        if params.get("max_length") is not None:
            if max_new_tokens is not None:
                raise OptionError("max_length and max_new_tokens say the same: write max_new_tokens only")
            max_new_tokens = whole_number("max_length", params["max_length"]) - prompt_length
            if max_new_tokens < 1:
                raise OptionError(
                    f"max_length counts the prompt's {prompt_length} tokens too: write max_new_tokens instead"
                )
        fitting = max(1, min(DEFAULT_NEW_TOKENS, self.target.context - prompt_length))
        return fitting if max_new_tokens is None else max_new_tokens

    def version(self) -> Hashable:
        """Return a key of the model's present state (`targets.loading.version_of`). Raise ModelError if the model has
        changed since it was loaded and kernels run it: only its own forward follows changes."""
        model, family = self.target.model, self.target.family
        if model.training:
            raise ModelError("the model is in training mode: call model.eval() first")
        version = version_of(model)
        edited = self._layers != tuple(family.layers) or all(one is not family.layers for one in family.base.modules())
        edited |= model.dtype != self.target.dtype or version[0] not in (self._made[0], *BACKENDS)
        if edited or (version != self._made and self.target.runner.name != "model"):
            raise ModelError(
                "the model's weights, dtype, layers, hooks or forwards have changed since it was loaded: load it again, "
                "or with kernels='off' if it will change again"
            )
        return version

    def take_decoder(
        self, rows: int = 1, reuse: bool = False, adapter: str | None = None
    ) -> tuple[Decoder, Callable[[], None]]:
        """Return a Decoder without requests (the last one if it fits), and a function that gives it back.

        Call it only after success: after an error the rows may hold anything.
        """
        target, drafter, policy = self.view(self.target.adapter if adapter is None else adapter)
        with self.target.turn:
            decoder_key = target, drafter, policy, rows, reuse, self.version()
            idle, self._idle = self._idle, None
            if idle is None or idle[0] != decoder_key:
                idle = decoder_key, Decoder(target, with_policy(drafter, policy), rows, reuse)
        decoder = idle[1]

        def give_back() -> None:
            if decoder.finished and not decoder.broken and is_worth_keeping(decoder.cycle_runner):
                self._idle = decoder_key, decoder

        return decoder, give_back


class Chat:
    """A conversation. Keys and values of earlier turns are used again, up to the first token that differs."""

    def __init__(self, llm: LLM, system: str | None, keywords: Keywords) -> None:
        self.llm = llm
        self.keywords = generate_keywords(keywords)
        sampling_of(self.keywords)  # impossible values are refused here
        if system is not None and not isinstance(system, str):
            raise InputError(f"a system message must be a string, not {type(system).__name__}")
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        self._decoders: dict[str, tuple[Hashable, Decoder]] = {}  # by adapter, with the version: keys are made by both
        self._streaming: Callable[[], Stream | None] = lambda: None  # a weak reference to the caller's stream

    def __repr__(self) -> str:
        last = f", last {self.messages[-1]['role']}: {shorten(self.messages[-1]['content'])!r}" if self.messages else ""
        return f"Chat({self.llm._name!r}, {len(self.messages)} messages{last})"

    @with_generate_keywords
    def send(self, text: str, **keywords: Unpack[GenerateKeywords]) -> Result:
        """Send a user's message; append it and the answer to the conversation."""
        stream = None
        try:
            with self.llm.target.turn:
                stream, append = self._begin(text, keywords, lambda: None)
                self._streaming = weakref.ref(stream)
            for _ in stream:
                pass
        except BaseException:
            if stream is not None and self._streaming() is stream:  # nobody reads it any more
                self._streaming = lambda: None
            raise
        append()
        return stream.result()

    @with_generate_keywords
    def stream(self, text: str, **keywords: Unpack[GenerateKeywords]) -> Stream:
        """Send a user's message as `send` does, and return the answer piece by piece. When the stream is closed early,
        the text so far is appended to the conversation."""
        with self.llm.target.turn:
            stream, _ = self._begin(text, keywords, None)
            self._streaming = weakref.ref(stream)
        return stream

    def _begin(
        self, text: str, keywords: GenerateKeywords, at_end: Callable[[], None] | None
    ) -> tuple[Stream, Callable[[], None]]:
        """Return the stream of an answer, and a function that appends it to the conversation, if the stream
        does not."""
        if (streaming := self._streaming()) is not None and streaming._open:
            raise InputError("the last answer is still being streamed: read it to its end, or close it")
        # a request that Ctrl-C has interrupted is nobody's, and its keys may be half written
        self._decoders = {key: one for key, one in self._decoders.items() if one[1].finished and not one[1].broken}
        if not isinstance(text, str) or not text.strip():
            raise InputError(
                "the message is empty" if isinstance(text, str) else f"a message is a string, not {type(text).__name__}"
            )
        params = generate_keywords(keywords, self.keywords)
        answer = Answer(*self.llm._request([*self.messages, {"role": "user", "content": text}], None, params))

        def append() -> None:
            if answer.totals.token_ids:
                reply: Keywords = {"role": "assistant", "content": answer.result().text}
                if answer.reader.stop_string is None and self.llm.tokenizer is not None:
                    ends = self.llm.eos | answer.request.eos
                    reply = reply_message(self.llm.tokenizer, answer.totals.token_ids, ends)
                self.messages += [{"role": "user", "content": text}, dict(reply)]

        return Stream(self._decoder(answer.request.adapter or ""), answer, at_end or append), append

    def _decoder(self, adapter: str) -> Decoder:
        version, (made, decoder) = self.llm.version(), self._decoders.get(adapter, (None, None))
        if decoder is None or made != version:
            target, drafter, policy = self.llm.view(adapter)
            decoder = Decoder(target, with_policy(drafter, policy), rows=1, reuse=True)
            self._decoders[adapter] = version, decoder
        return decoder


def sampling_of(params: Keywords) -> Sampling:
    """Return the Sampling of complete keywords. Raise OptionError for values out of range."""
    return Sampling(**{f.name: plain_number(params[f.name]) for f in fields(Sampling)})


def new_policy(drafter: Drafter, fallback: bool = True, compared: bool = False) -> Policy | None:
    """Return a policy that has learnt nothing yet, if one plugs in. `core.sockets.PolicyPlug` has the parameters."""
    return None if POLICY.plug is None else POLICY.plug.make_controller(drafter, fallback, compared)


def _single(prompt: Any) -> Prompt:
    """Return a prompt as `as_prompts` does. Raise InputError unless it is exactly one."""
    prompts, _ = as_prompts(prompt)
    if len(prompts) != 1:
        empty = "the prompt is empty: give at least one token"
        raise InputError(f"one prompt at a time, not {len(prompts)}" if prompts else empty)
    return prompts[0]


def _eos(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """Return the token ids that end an answer: of the generation config, else the model config, else the tokenizer."""
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            listed = list(ids) if isinstance(ids, list | tuple) else [ids]
            if not all(isinstance(token, int) for token in listed):
                raise ModelError(
                    f"eos_token_id must be a token id or a list of them, but it is {ids!r} in {type(source).__name__}"
                )
            return frozenset(listed)
    return frozenset()
