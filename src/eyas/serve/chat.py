"""POST /v1/chat/completions: a conversation, by the tokenizer's chat template."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

from fastapi import Request, Response
from pydantic import Field, PrivateAttr

from eyas.arguments import STRUCTURE_KEYWORDS, Keywords, MediaIds, Messages
from eyas.core.logprobs import TokenLogprobs
from eyas.errors import InputError
from eyas.serve.errors import JsonObject, bad_request
from eyas.serve.fields import Body, GenerationBody, Limit, Logprobs, Strict
from eyas.serve.http import request_id
from eyas.serve.logprobs import TokenTexts
from eyas.serve.marks import Grammar, grammar_of
from eyas.serve.reading import Reader, message_of
from eyas.serve.records import Delta, Job, Totals
from eyas.serve.reply import Choices, Events, reply
from eyas.serve.service import Service
from eyas.serve.tools import Tools, tools_of, written_tools
from eyas.text import write_chat

# Claude Code counts its requests in the first line of the system text: no two prompts would begin alike
BILLING = re.compile(r"\s*x-anthropic-billing-header:[^\n]*\n*")
LAST = "(the last message ends here)"  # is looked for in a rendered chat


class Part(Strict):
    """A part of a text."""

    type: Literal["text"]
    text: str


class Prediction(Strict):
    """OpenAI's predicted output: text that the answer probably contains."""

    type: Literal["content"]
    content: str | list[Part]

    @property
    def text(self) -> str:
        """Return the predicted text, joined from its parts."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class TemplateFields(Body):
    """Keywords for the chat template, besides the messages."""

    tools: list[JsonObject] | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    reasoning_effort: str | None = None
    verbosity: Literal["low", "medium", "high"] | None = None

    _places: tuple[str, ...] = PrivateAttr(())

    def placed(self, places: Sequence[str], body: Body) -> Self:
        """Keep the names of messages in another dialect, for errors, and the dialect of the body. Return the
        chat itself."""
        self._places, self._without_place = tuple(places), body._without_place
        return self

    def check_variables(self, template: str) -> None:
        """Note a reasoning effort and a verbosity that the chat template does not read. A medium verbosity is the usual
        one."""
        variable = "enable_thinking" if self.reasoning_effort == "none" else "reasoning_effort"
        if self.reasoning_effort is not None and variable not in template:
            self._without_place.append("reasoning_effort")
        if self.verbosity not in (None, "medium") and "verbosity" not in template:
            self._without_place.append("verbosity")

    def in_its_places(self, error: InputError) -> InputError:
        """Return an error about the messages in the words of the client's dialect."""

        def name(found: re.Match[str]) -> str:
            number = int(found[1])
            return self._places[number - 1] if 1 <= number <= len(self._places) else found[0]

        return InputError(re.sub(r"\bmessage (\d+)", name, str(error)))

    def template(self) -> JsonObject:
        """Return the keywords of the chat template that the fields ask for."""
        effort: JsonObject = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        if self.reasoning_effort == "none":
            effort = {"enable_thinking": False}
        verbosity: JsonObject = {} if self.verbosity is None else {"verbosity": self.verbosity}
        return {
            "add_generation_prompt": self.add_generation_prompt is not False,
            "continue_final_message": bool(self.continue_final_message),
            "chat_template_kwargs": {**effort, **verbosity, **(self.chat_template_kwargs or {})},
        }


class ChatBody(TemplateFields, GenerationBody):
    """A conversation."""

    messages: Annotated[list[JsonObject], Field(min_length=1)]
    max_completion_tokens: Limit | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    prediction: Prediction | None = None
    return_token_ids: bool | None = None  # list the ids of the answer, as vLLM does
    return_meta_info: bool | None = None  # counts of the answer and its drafts, as SGLang gives them

    def check(self) -> None:
        super().check()
        if self.return_meta_info and self.stream:
            raise bad_request("a stream has no meta_info: leave return_meta_info out", "return_meta_info")


async def chat(service: Service, request: Request, body: ChatBody) -> Response:
    """Answer POST /v1/chat/completions."""
    made = await prepare(service, body)
    identity = request_id(request.scope)
    dialect = ChatCompletion(made.job, made.model, identity, body, service.token_texts, made.new_reader)
    return await reply(service, request, dialect, bool(body.stream), body.response_headers)


@dataclass(frozen=True)
class Chat:
    """A chat that was read and checked: the work for the engine, and how to read the answer."""

    job: Job
    model: str  # the name by which the client knows it
    new_reader: Callable[[], Reader]  # makes one for each sequence


async def prepare(service: Service, body: ChatBody) -> Chat:
    """Turn the body of a chat into work for the engine. Raise ApiError for fields that are not served."""
    model = service.model_name(body.model)
    n = body.n or 1
    service.settings.check_count(1, n)
    tools = tools_of(body.tools, body.tool_choice, body.parallel_tool_calls)
    prompt = await service.in_worker(prompt_of, service, body.messages, body, tools)
    structure = _structure_of(body.keywords())
    grammar = grammar_of(service.llm, tools, structure)
    reader = await service.in_worker(_reader, service, grammar, body, tools)
    ids = (*prompt.ids, *service.encode(reader.added, special=False))
    asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    keywords = body.keywords(
        max_new_tokens=service.settings.answer_tokens(len(ids), asked),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    keywords |= service.adapter_keywords(model)
    tools.constrain(keywords)
    predicted = body.prediction.text if body.prediction else ""
    keywords["prediction"] = await service.in_worker(service.encode, predicted, False) if predicted else ()
    job = Job((ids,), keywords, n, media=prompt.media, **body.job_fields())
    return Chat(job, model, reader.new)


def _structure_of(keywords: Keywords) -> str:
    """Return the keyword by which a request asks for structured output; "" for free text."""
    free = (None, {"type": "text"})
    return next((name for name in STRUCTURE_KEYWORDS if keywords.get(name) not in free), "")


def _reader(service: Service, grammar: Grammar, body: ChatBody, tools: Tools) -> Reader:
    """Return the reader of the answers. The end of the prompt says which region it leaves open."""
    messages = [{**message, "content": _text_of(message.get("content"))} for message in body.messages]
    prefill = messages[-1]["content"] if body.continue_final_message else ""
    last = len(messages) - 1 - bool(body.continue_final_message)
    if last >= 0:
        messages[last]["content"] += LAST
    try:
        written, _ = write_chat(service.tokenizer, messages, tools=tools.listed or None, **body.template())
    except InputError:  # of a template that takes no other text
        written = ""
    _, found, opening = written.rpartition(LAST)
    opening = opening if found or last < 0 else ""
    return Reader(grammar, opening.rpartition(prefill.strip())[0] if prefill.strip() else opening, prefill)


def _text_of(content: Any) -> str:
    parts = content if isinstance(content, list) else [{"text": content}]
    return "\n".join(str(part.get("text") or "") for part in parts)


def prompt_of(service: Service, messages: Messages, fields: TemplateFields, tools: Tools) -> MediaIds:
    """Return the conversation with the tools that the model may call."""
    fields.check_variables(str(service.tokenizer.chat_template))
    listed = written_tools(service.tokenizer, tools)
    try:
        return service.render(list(map(_without_billing, messages)), **fields.template(), **listed)
    except InputError as error:
        raise fields.in_its_places(error) from error


def _without_billing(message: Any) -> Any:
    content = message.get("content") if message.get("role") in ("system", "developer") else None
    parts = content if isinstance(content, list) else [{"text": content}]
    text = parts[0].get("text") if parts and isinstance(parts[0], dict) else None
    if not isinstance(text, str) or not (line := BILLING.match(text)):
        return message
    rest = text[line.end() :]
    kept = [*([{**parts[0], "text": rest}] if rest else ()), *parts[1:]]
    return {**message, "content": kept if isinstance(content, list) and kept else rest}


@dataclass
class ChatCompletion(Choices):
    """An answer in the form of OpenAI's chat completions."""

    texts: TokenTexts
    new_reader: Callable[[], Reader]
    _readers: dict[int, Reader] = field(default_factory=dict)  # readers of the sequences

    prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def begun(self) -> Events:
        return [self.chunk(_chunk_choice(i, {"role": "assistant", "content": ""})) for i in range(self.job.n)]

    def reasoning_tokens(self) -> int:
        """Return the number of tokens that count as reasoning."""
        return sum(reader.reasoning_tokens for reader in self._readers.values())

    def choice(self, index: int, totals: Totals) -> JsonObject:
        """Return one finished choice."""
        reader = self._readers[index] = self.new_reader()
        return {
            "index": index,
            "message": message_of(reader, index, totals),
            "logprobs": self._logprobs(totals.logprobs),
            "finish_reason": _finish(reader, totals.finish),
            "stop_reason": totals.stop_reason,
            **({"token_ids": list(totals.token_ids)} if self.body.return_token_ids else {}),
            **self._meta_info([totals]),
        }

    def chunk_choices(self, delta: Delta) -> list[JsonObject]:
        if delta.index not in self._readers:
            self._readers[delta.index] = self.new_reader()
        reader = self._readers[delta.index]
        choices = [_chunk_choice(delta.index, part) for part in reader.read(delta)]
        logprobs = self._logprobs(delta.logprobs)
        ids = list(delta.token_ids) if self.body.return_token_ids else []
        if not choices and (logprobs or ids or (delta.cycle and not delta.finish)):
            choices = [_chunk_choice(delta.index, {"content": ""})]
        if choices:
            choices[0]["logprobs"] = logprobs
        if delta.finish:
            choices.append(
                {**_chunk_choice(delta.index, {}, _finish(reader, delta.finish)), "stop_reason": delta.stop_reason}
            )
        if self.body.return_token_ids:
            for number, choice in enumerate(choices):
                choice["token_ids"] = [] if number else ids
        return choices

    def extra(self, totals: list[Totals]) -> JsonObject:
        first = totals[0].prompt_logprobs
        logprobs = {"prompt_logprobs": self.texts.prompt(first)} if first else {}
        return {**logprobs, **self._meta_info(totals)}

    def _meta_info(self, totals: Sequence[Totals]) -> JsonObject:
        """Return the counts of a single sequence: SGLang puts them into its choice, and z-lab's benchmark reads them
        from the response."""
        wanted = self.body.return_meta_info and len(totals) == 1
        return {"meta_info": totals[0].meta_info()} if wanted else {}

    def _logprobs(self, values: Sequence[TokenLogprobs]) -> JsonObject | None:
        count: int | None = self.job.keywords.get("logprobs")
        return None if count is None or not values else self.texts.chat(values, count)


def _finish(reader: Reader, reason: str | None) -> str | None:
    return "tool_calls" if reader.called and reason == "stop" else reason


def _chunk_choice(index: int, delta: JsonObject, finish: str | None = None) -> JsonObject:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
