"""POST /infill: llama.cpp's route for editors, which ask for the text at the cursor."""

from __future__ import annotations

from typing import Any

from fastapi import Request, Response

from eyas.serve.access import request_id
from eyas.serve.completions import Completion
from eyas.serve.limits import answer_tokens
from eyas.serve.middle import middle_of
from eyas.serve.protocol.infill import InfillBody
from eyas.serve.records import Job
from eyas.serve.reply import reply
from eyas.serve.service import Service

__all__ = ["infill"]


async def infill(service: Service, request: Request, body: InfillBody) -> Response:
    """Answer one request in llama.cpp's form."""
    model = service.model_name(body.model)
    files = [(file.filename, file.text) for file in body.input_extra or ()]
    made = await service.in_worker(middle_of, service.tokenizer, body.input_prefix, body.input_suffix, files)
    begun = service.encode(body.prompt, special=False) if body.prompt else ()
    ids = (*made.ids, *begun)
    asked = body.max_tokens if body.n_predict in (None, -1) else body.n_predict
    new_tokens = answer_tokens(service.settings, len(ids), asked, service.settings.max_tokens)
    keywords = body.keywords(max_new_tokens=new_tokens)
    made.end(keywords)
    job = Job((ids,), keywords | service.adapter_keywords(model), **body.job_fields())
    return await reply(service, request, body, Infill(job, model, request_id(request.scope), service.token_texts))


class Infill(Completion):
    """llama.cpp's form of a completion."""

    def envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
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
