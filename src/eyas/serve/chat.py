"""POST /v1/chat/completions: a conversation, by the tokenizer's chat template."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request, Response

from eyas.arguments import STRUCTURE_KEYWORDS, MediaIds
from eyas.core.logprobs import TokenLogprobs
from eyas.errors import InputError
from eyas.serve.access import request_id
from eyas.serve.limits import answer_tokens, check_count
from eyas.serve.logprobs import TokenTexts
from eyas.serve.marks import Grammar, grammar_of
from eyas.serve.protocol.chat import ChatBody, Prediction, TemplateFields
from eyas.serve.reading import Reader, message_of
from eyas.serve.records import Delta, Job, Totals
from eyas.serve.reply import Dialect, reply
from eyas.serve.service import Service
from eyas.serve.tools import Tools, tools_of, written_tools
from eyas.text import write_chat

__all__ = ["Chat", "chat", "prepare", "prompt_of"]

# Claude Code counts its requests in the first line of the system text: no two prompts would begin alike
BILLING = re.compile(r"\s*x-anthropic-billing-header:[^\n]*\n*")
LAST = "(the last message ends here)"  # is looked for in a rendered chat


async def chat(service: Service, request: Request, body: ChatBody) -> Response:
    """Answer one request."""
    made = await prepare(service, body)
    job = made.job
    dialect = ChatCompletion(
        job,
        made.model,
        request_id(request.scope),
        service.token_texts,
        made.new_reader,
        job.keywords.get("logprobs"),
        bool(body.return_token_ids),
    )
    return await reply(service, request, body, dialect)


@dataclass(frozen=True)
class Chat:
    """A conversation that can be decoded, in whichever dialect it came."""

    job: Job
    model: str  # the name by which the client knows it
    new_reader: Callable[[], Reader]  # makes one for each sequence


async def prepare(service: Service, body: ChatBody) -> Chat:
    """Check a conversation, and make its prompt and its job."""
    model = service.model_name(body.model)
    n = body.n or 1
    check_count(service.settings, 1, n)
    tools = tools_of(body.tools, body.tool_choice, body.parallel_tool_calls)
    prompt = await service.in_worker(prompt_of, service, body.messages, body, tools)
    structure = _structure_of(body.keywords())
    grammar = grammar_of(service.llm, tools, structure)
    reader = await service.in_worker(_reader, service, grammar, body, tools)
    ids = (*prompt.ids, *service.encode(reader.added, special=False))
    asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    keywords = body.keywords(
        max_new_tokens=answer_tokens(service.settings, len(ids), asked, service.settings.max_tokens),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    keywords |= service.adapter_keywords(model)
    tools.constrain(keywords)
    keywords["prediction"] = await service.in_worker(predicted_tokens, service, body.prediction)
    job = Job((ids,), keywords, n, media=prompt.media, **body.job_fields())
    return Chat(job, model, reader.new)


def _structure_of(keywords: Mapping[str, Any]) -> str:
    """Return the keyword by which a request asks for structured output; "" for free text."""
    free = (None, {"type": "text"})
    return next((name for name in STRUCTURE_KEYWORDS if keywords.get(name) not in free), "")


def _reader(service: Service, grammar: Grammar, body: ChatBody, tools: Tools) -> Reader:
    """Return the reader of the answers. Which region the prompt leaves open depends on its end, not on the messages
    before: on the text that the template writes after the last message, and on the beginning of an answer that the
    client gives."""
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


def prompt_of(
    service: Service, messages: Sequence[Mapping[str, Any]], fields: TemplateFields, tools: Tools
) -> MediaIds:
    """Return the conversation with the tools that the model may call."""
    fields.check_effort(str(service.tokenizer.chat_template))
    listed = written_tools(service.tokenizer, tools)
    try:
        return service.render(list(map(_without_billing, messages)), **fields.template(), **listed)
    except InputError as error:
        raise fields.in_its_places(error) from error


def _without_billing(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message of the system's without the line in which Claude Code counts its requests."""
    content = message.get("content") if message.get("role") in ("system", "developer") else None
    parts = content if isinstance(content, list) else [{"text": content}]
    text = parts[0].get("text") if parts and isinstance(parts[0], dict) else None
    if not isinstance(text, str) or not (line := BILLING.match(text)):
        return message
    rest = text[line.end() :]
    kept = [*([{**parts[0], "text": rest}] if rest else ()), *parts[1:]]
    return {**message, "content": kept if isinstance(content, list) and kept else rest}


def predicted_tokens(service: Service, prediction: Prediction | None) -> tuple[int, ...]:
    """Return OpenAI's predicted output as token ids."""
    text = prediction.text if prediction else ""
    return service.encode(text, special=False) if text else ()


@dataclass
class ChatCompletion(Dialect):
    """OpenAI's chat completions."""

    texts: TokenTexts
    new_reader: Callable[[], Reader]
    logprobs: int | None = None  # most probable tokens to list; None: no log-probabilities
    token_ids: bool = False  # list the ids of the answer, as vLLM does

    _readers: dict[int, Reader] = field(default_factory=dict)  # readers of the sequences

    prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self) -> list[dict[str, Any]]:
        return [_chunk_choice(i, {"role": "assistant", "content": ""}) for i in range(self.job.n)]

    def reasoning_tokens(self) -> int:
        return sum(reader.reasoning_tokens for reader in self._readers.values())

    def choice(self, index: int, totals: Totals) -> dict[str, Any]:
        reader = self._readers[index] = self.new_reader()
        return {
            "index": index,
            "message": message_of(reader, index, totals),
            "logprobs": self._logprobs(totals.logprobs),
            "finish_reason": _finish(reader, totals.finish),
            "stop_reason": totals.stop_reason,
            **({"token_ids": list(totals.token_ids)} if self.token_ids else {}),
        }

    def chunk_choices(self, delta: Delta) -> list[dict[str, Any]]:
        if delta.index not in self._readers:
            self._readers[delta.index] = self.new_reader()
        reader = self._readers[delta.index]
        choices = [_chunk_choice(delta.index, part) for part in reader.read(delta)]
        logprobs = self._logprobs(delta.logprobs)
        ids = list(delta.token_ids) if self.token_ids else []
        if not choices and (logprobs or ids or (delta.cycle and not delta.finish)):
            choices = [_chunk_choice(delta.index, {"content": ""})]
        if choices:
            choices[0]["logprobs"] = logprobs
        if delta.finish:
            choices.append(
                {**_chunk_choice(delta.index, {}, _finish(reader, delta.finish)), "stop_reason": delta.stop_reason}
            )
        if self.token_ids:
            for number, choice in enumerate(choices):
                choice["token_ids"] = [] if number else ids
        return choices

    def extra(self, totals: list[Totals]) -> dict[str, Any]:
        first = totals[0].prompt_logprobs
        return {"prompt_logprobs": self.texts.prompt(first)} if first else {}

    def _logprobs(self, values: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        return None if self.logprobs is None or not values else self.texts.chat(values, self.logprobs)


def _finish(reader: Reader, reason: str | None) -> str | None:
    return "tool_calls" if reader.called and reason == "stop" else reason


def _chunk_choice(index: int, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
