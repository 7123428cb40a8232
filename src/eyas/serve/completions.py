"""POST /v1/completions: text or token ids go on as they are, without a chat template. POST /infill: llama.cpp's route
for editors, which ask for the text at the cursor.

With `echo` the text and the log-probabilities begin with the prompt's. `max_tokens: 0` asks for the
prompt alone: one token is generated all the same, because the engine always generates one, and is
left out of the response.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Request, Response
from pydantic import BaseModel, Field, field_validator

from eyas.core.logprobs import TokenLogprobs
from eyas.serve.errors import JsonObject, bad_request
from eyas.serve.fields import WITHOUT_EFFECT, GenerationBody, Logprobs
from eyas.serve.http import request_id
from eyas.serve.logprobs import TextOffsets, TokenTexts
from eyas.serve.middle import Middle, middle_of
from eyas.serve.records import Delta, Job, Totals
from eyas.serve.reply import Choices, reply
from eyas.serve.service import Service

DEFAULT_TOKENS = 16  # OpenAI's default


class CompletionBody(GenerationBody):
    """Prompts as text or token ids, one or several."""

    prompt: str | list[str] | list[int] | list[list[int]]
    suffix: str | None = None  # what stands behind the text that is asked for
    echo: bool | None = None
    logprobs: Logprobs | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None  # list the ids of the answer, as vLLM does

    @field_validator("prompt", mode="before")
    @classmethod
    def _prompt(cls, value: Any) -> Any:
        listed = value if isinstance(value, list) and value else [None]
        of_one_kind = _is_ids(value) or all(isinstance(v, str) for v in listed) or all(map(_is_ids, listed))
        if not isinstance(value, str) and not of_one_kind:
            raise ValueError(
                "must be a string, a list of strings, a list of token ids or a list of those, and not empty"
            )
        return value

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts: texts, or lists of token ids."""
        given: Any = self.prompt
        return [given] if isinstance(given, str) or _is_ids(given) else list(given)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


class File(BaseModel):
    """A further file."""

    text: str
    filename: str = "file"


class InfillBody(GenerationBody):
    """The texts before and after the middle. The response names fields of llama.cpp's server that have no
    effect here."""

    input_prefix: str
    input_suffix: str
    input_extra: list[File] | None = None
    prompt: str | None = None  # the beginning of the middle
    n_predict: Annotated[int, Field(ge=-1)] | None = None  # -1: as many as fit

    def check(self) -> None:
        """Refuse nothing."""

    @property
    def ignored(self) -> list[str]:
        """The unknown fields that were given, but for llama.cpp's without effect."""
        given = {name: value for name, value in (self.model_extra or {}).items() if name not in WITHOUT_EFFECT}
        return sorted(name for name, value in given.items() if value not in (None, *(self.neutral(name) or ())))


async def complete(service: Service, request: Request, body: CompletionBody) -> Response:
    """Answer POST /v1/completions."""
    model = service.model_name(body.model)
    prompts, n = body.prompts(), body.n or 1
    service.settings.check_count(len(prompts), n)
    if body.max_tokens == 0 and not body.echo:
        raise bad_request("max_tokens is 0, which asks for nothing: with echo it gives the prompt back", "max_tokens")
    middles = await service.in_worker(_middles, service, body)
    special = body.add_special_tokens is not False
    ids = tuple(one.ids for one in middles) or await service.in_worker(
        lambda: tuple(service.encode(prompt, special) for prompt in prompts)
    )
    asked = 1 if body.max_tokens == 0 else body.max_tokens
    keywords = body.keywords(
        max_new_tokens=service.settings.answer_tokens(max(map(len, ids)), asked, DEFAULT_TOKENS),
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo and body.prompt_logprobs is None else body.prompt_logprobs,
    )
    keywords |= service.adapter_keywords(model)
    if middles:
        middles[0].end(keywords)
    job = Job(ids, keywords, n, **body.job_fields())
    echoes = []
    if body.echo:
        echoes = await service.in_worker(lambda: [p if isinstance(p, str) else service.decode(p) for p in prompts])
    dialect = Completion(
        job,
        model,
        request_id(request.scope),
        body,
        service.token_texts,
        logprobs=body.logprobs is not None,
        echoes=echoes,
        hides_answer=body.max_tokens == 0,
        prompt_logprobs=body.prompt_logprobs is not None,
        token_ids=bool(body.return_token_ids),
    )
    return await reply(service, request, dialect, bool(body.stream), body.response_headers)


def _middles(service: Service, body: CompletionBody) -> list[Middle]:
    """Return the prompts for the text between each prompt and the suffix; [] without a suffix."""
    if not body.suffix:
        return []
    prompts = [prompt for prompt in body.prompts() if isinstance(prompt, str)]
    if body.echo or len(prompts) < len(body.prompts()):
        raise bad_request("a suffix is for prompts of text, without echo: leave it out", "suffix")
    return [middle_of(service.tokenizer, prompt, body.suffix) for prompt in prompts]


@dataclass
class Completion(Choices):
    """An answer in the form of OpenAI's completions."""

    texts: TokenTexts
    logprobs: bool = False
    echoes: list[str] = field(default_factory=list)  # the prompts' texts, if they come first
    hides_answer: bool = False
    prompt_logprobs: bool = False  # in the form of vLLM, in addition to OpenAI's
    token_ids: bool = False  # likewise
    _offsets: dict[int, TextOffsets] = field(default_factory=dict)  # in the answer of each sequence

    prefix = "cmpl"
    object = chunk_object = "text_completion"

    def choice(self, index: int, totals: Totals) -> JsonObject:
        """Return one finished choice."""
        return self.chunk_choices(totals.as_delta(index))[0]

    def chunk_choices(self, delta: Delta) -> list[JsonObject]:
        begins = delta.prefill and bool(self.echoes)
        wants_tokens = self.logprobs or self.token_ids
        if not (delta.text or delta.finish or begins or delta.cycle or (wants_tokens and delta.token_ids)):
            return []
        text = "" if self.hides_answer else delta.text
        choice = {
            "index": delta.index,
            "text": self.echoes[delta.index // self.job.n] + text if begins else text,
            "logprobs": self._logprobs(delta, begins) if self.logprobs else None,
            "finish_reason": "length" if delta.finish and self.hides_answer else delta.finish,
            "stop_reason": delta.stop_reason,
        }
        if self.token_ids:
            choice["token_ids"] = [] if self.hides_answer else list(delta.token_ids)
        if delta.prompt_logprobs and self.prompt_logprobs:
            choice["prompt_logprobs"] = self.texts.prompt(delta.prompt_logprobs)
        return [choice]

    def _logprobs(self, delta: Delta, begins: bool) -> JsonObject:
        tokens = () if self.hides_answer else delta.token_ids
        values: tuple[TokenLogprobs | None, ...] = () if self.hides_answer else delta.logprobs
        echo = self.echoes[delta.index // self.job.n] if self.echoes else ""
        if delta.index not in self._offsets:
            self._offsets[delta.index] = self.texts.offsets(echo, len(echo))
        offsets = list(map(self._offsets[delta.index].read, tokens))
        if begins:
            prompt = self.job.prompts[delta.index // self.job.n]
            offsets = [*map(self.texts.offsets(echo).read, prompt), *offsets]
            tokens, values = prompt + tokens, delta.prompt_logprobs + values
        return self.texts.completion(tokens, values, offsets)


async def infill(service: Service, request: Request, body: InfillBody) -> Response:
    """Answer POST /infill, llama.cpp's route for text in the middle."""
    model = service.model_name(body.model)
    files = [(file.filename, file.text) for file in body.input_extra or ()]
    made = await service.in_worker(middle_of, service.tokenizer, body.input_prefix, body.input_suffix, files)
    begun = service.encode(body.prompt, special=False) if body.prompt else ()
    ids = (*made.ids, *begun)
    asked = body.max_tokens if body.n_predict in (None, -1) else body.n_predict
    new_tokens = service.settings.answer_tokens(len(ids), asked)
    keywords = body.keywords(max_new_tokens=new_tokens)
    made.end(keywords)
    job = Job((ids,), keywords | service.adapter_keywords(model), **body.job_fields())
    dialect = Infill(job, model, request_id(request.scope), body, service.token_texts)
    return await reply(service, request, dialect, bool(body.stream), body.response_headers)


class Infill(Completion):
    """An answer in the form of llama.cpp's /infill."""

    def envelope(self, kind: str, choices: list[JsonObject]) -> JsonObject:
        choice = choices[0] if choices else {"text": "", "finish_reason": None, "stop_reason": None}
        stop, reason = choice["finish_reason"], choice["stop_reason"]
        word = reason if isinstance(reason, str) else ""
        kinds = {None: "none", "length": "limit", "stop": "word" if word else "eos"}
        return {
            "content": choice["text"],
            "stop": stop is not None,
            "stop_type": kinds[stop],
            "stopping_word": word,
            "model": self.model,
            "tokens_evaluated": len(self.job.prompts[0]),
        }
