"""A server of OpenAI's interface as a deployment: /v1/completions of vLLM, SGLang, llama.cpp, eyas and others.

Prompts are sent as token ids. The answer's ids are taken from where the server has them, the best place first:

    token_ids     vLLM and eyas, on `return_token_ids`
    logprobs      `tokens` such as "token_id:318" (vLLM, on `return_tokens_as_token_ids`), or `content` with an `id` (llama.cpp)
    text          encoded again by the referee's tokenizer

The last weakens the audit: a text may have several encodings, so that tokens may be judged that the server has not drawn.
Only answers are used whose encoding has as many tokens as the server counts.

This module knows no statistics.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from eyas.errors import InputError, one_line
from eyas_lab.audit.deployments import Answer, Ask

__all__ = ["ServerDeployment"]

JsonObject = Mapping[str, Any]

LOCAL = ("localhost", "127.0.0.1", "::1")
DRAFTED = "spec_decode_num_draft_tokens_total"
# Fields beyond OpenAI's that return token ids or log-probabilities; the audit uses the first set that the server accepts.
FIELDS: tuple[dict[str, Any], ...] = (
    {"return_token_ids": True, "logprobs": 0},
    {"return_tokens_as_token_ids": True, "logprobs": 1},
    {"logprobs": 1},
    {},
)


class ServerDeployment:
    """A server by its URL, such as http://127.0.0.1:8000/v1.

    Args:
        model: its name for the model; "": the first one that it lists.
        encode: from an answer's text to ids.
        eos: tokens that end an answer; a server may leave the last one out.
        rows: requests at a time when several are asked together.
        extra: further fields of the body.
        key: an API key.

    Raises:
        InputError: the server does not answer as it should.
    """

    def __init__(
        self,
        url: str,
        encode: Callable[[str], Sequence[int]],
        eos: Sequence[int] = (),
        *,
        model: str = "",
        rows: int = 4,
        extra: JsonObject | None = None,
        key: str = "",
        timeout: float = 600.0,
    ) -> None:
        self.url, self.encode, self.eos = url.rstrip("/"), encode, sorted(eos)
        self.rows, self.extra, self.key, self.timeout = rows, dict(extra or {}), key, timeout
        if urllib.parse.urlsplit(self.url).scheme not in ("http", "https"):
            raise InputError(f"--url {url}: write it as http://127.0.0.1:8000/v1")
        host = urllib.parse.urlsplit(self.url).hostname or ""
        self._opener = urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if host in LOCAL else []))
        self.model = model or self._first_model()
        self.name = f"{self.model} at {self.url}"
        self.fields: dict[str, Any] = {}
        self.ids_from = ""  # "token_ids", "logprobs" or "text"; known after `probe`

    def probe(self, prompt_ids: Sequence[int]) -> str:
        """Find out where this server has the ids of an answer; return it."""
        for fields in FIELDS:
            self.fields = fields
            try:
                choice = self._complete(self._body(prompt_ids, 4, temperature=0.0))["choices"][0]
            except InputError as error:
                if fields == FIELDS[-1] or "answers HTTP 4" not in str(error):
                    raise
                continue
            self.ids_from = _place_of_ids(choice)
            if self.ids_from != "text":
                break
        return self.ids_from

    def generate(self, prompt_ids: Sequence[int], *, max_new_tokens: int, **sampling: Any) -> Answer:
        """Answer one request."""
        if not self.ids_from:
            self.probe(prompt_ids)
        response = self._complete(self._body(prompt_ids, max_new_tokens, **sampling))
        choice = response["choices"][0]
        ids, logprobs = self._ids(choice), _logprobs(choice)
        counted = (response.get("usage") or {}).get("completion_tokens", len(ids))
        if self.ids_from == "text" and counted not in (len(ids), len(ids) + 1):
            return Answer(())
        if choice.get("finish_reason") == "stop" and self.eos and ids[-1:] and ids[-1] not in self.eos:
            if len(self.eos) > 1 and counted == len(ids):
                return Answer(tuple(ids), logprobs=logprobs)
            ids = [*ids, self.eos[0]]
        return Answer(tuple(ids[:max_new_tokens]), logprobs=logprobs)

    def draft_tokens(self) -> int | None:
        """Return how many tokens the server has drafted since it started, by its metrics (vLLM's names); None: unknown."""
        try:
            with self._opener.open(self.url.removesuffix("/v1") + "/metrics", timeout=self.timeout) as response:
                lines = response.read().decode("utf-8", "replace").splitlines()
            counts = [float(line.rsplit(" ", 1)[1]) for line in lines if DRAFTED in line and line[0] != "#"]
        except (OSError, ValueError, IndexError):
            return None
        return int(sum(counts)) if counts else None

    def generate_together(self, asks: Sequence[Ask]) -> list[Answer]:
        """Answer several requests, `rows` of them at a time."""
        with ThreadPoolExecutor(self.rows) as pool:
            return list(pool.map(lambda ask: self.generate(ask.prompt_ids, **ask.keywords()), asks))

    def _body(self, prompt_ids: Sequence[int], max_new_tokens: int, **sampling: Any) -> dict[str, Any]:
        given = {name: value for name, value in sampling.items() if name != "top_k" or value}
        base = {"model": self.model, "prompt": list(prompt_ids), "max_tokens": max_new_tokens}
        return {**base, **self.fields, **self.extra, **given}  # what is audited is not replaced

    def _ids(self, choice: JsonObject) -> list[int]:
        if self.ids_from == "token_ids":
            return [int(token) for token in choice["token_ids"]]
        if self.ids_from == "logprobs":
            return _ids_of_logprobs(choice)
        return list(self.encode(choice.get("text") or ""))

    def _first_model(self) -> str:
        listed = self._send("/models", None)
        try:
            return str(listed["data"][0]["id"])
        except (LookupError, TypeError):
            raise InputError(f"{self.url}/models lists no model: is this the base URL of the interface?") from None

    def _complete(self, body: JsonObject) -> Any:
        response = self._send("/completions", body)
        if not isinstance(response, dict) or not response.get("choices"):
            raise InputError(f"{self.url}/completions has answered without choices: {one_line(response, 120)}")
        return response

    def _send(self, path: str, body: JsonObject | None) -> Any:
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {self.key}"} if self.key else {})}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with self._opener.open(request, timeout=self.timeout) as response:
                return json.loads(response.read())
        except urllib.error.HTTPError as error:
            said = one_line(error.read(500).decode("utf-8", "replace"), 200)
            raise InputError(f"{self.url}{path} answers HTTP {error.code}: {said}") from error
        except (TimeoutError, urllib.error.URLError, ConnectionError) as error:
            raise InputError(f"{self.url} does not answer: {one_line(getattr(error, 'reason', error), 120)}") from error
        except ValueError as error:
            raise InputError(f"{self.url}{path} does not answer in JSON") from error


def _place_of_ids(choice: JsonObject) -> str:
    if choice.get("token_ids"):
        return "token_ids"
    try:
        return "logprobs" if _ids_of_logprobs(choice) else "text"
    except (LookupError, TypeError, ValueError):
        return "text"


def _ids_of_logprobs(choice: JsonObject) -> list[int]:
    logprobs = choice["logprobs"]
    if "content" in logprobs:  # llama.cpp
        return [int(entry["id"]) for entry in logprobs["content"]]
    return [int(token.removeprefix("token_id:")) for token in logprobs["tokens"] if token.startswith("token_id:")]


def _logprobs(choice: JsonObject) -> tuple[float, ...] | None:
    found = choice.get("logprobs") or {}
    values = [entry["logprob"] for entry in found["content"]] if "content" in found else found.get("token_logprobs")
    return tuple(map(float, values)) if values and None not in values else None
