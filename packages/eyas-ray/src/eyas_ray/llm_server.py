"""A server of eyas under `ray.serve.llm`, as the class that a model's `server_cls` names.

Ray's ingress speaks OpenAI's interface with clients, and calls `chat`, `completions`, `tokenize` and `detokenize` of a
replica. Each of them asks the server's own application in the same process, so a request is checked and answered as
without Ray. `ray.serve.llm` takes its classes of requests and answers from vLLM or SGLang and cannot be imported
without one of them; so this module imports it when an answer is made.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

from eyas_ray.replica import App, Message, Server

__all__ = ["LLMServer", "asked", "options_of"]

Answers = AsyncGenerator[Any, None]  # an object of `ray.serve.llm`, or the events of a stream

END = "\n\n"  # ends an event of a stream
OWN_HEADERS = {"content-length", "content-type", "host", "transfer-encoding"}  # set anew inside the process


def options_of(llm_config: Any) -> dict[str, Any]:
    """Return the options of `eyas serve` that a `LLMConfig` describes.

    The target is its `model_source`, or its `model_id` where it has no source; clients use the `model_id`. Its
    `engine_kwargs` are options by name, such as {"draft": ..., "rows": 16}.
    """
    loading = llm_config.model_loading_config
    source = loading.model_source if isinstance(loading.model_source, str) else loading.model_id
    return {"target": source, "name": loading.model_id, **llm_config.engine_kwargs}


class LLMServer:
    """The class of a deployment of `ray.serve.llm`. Its methods are Ray's `LLMServerProtocol`, by name.

    A subclass says in `make` how the server is made. The protocol's other calls, such as sleep, pause and
    profiles, are not there: Ray's ingress answers such a call with an error.
    """

    server: Server

    async def __init__(self, llm_config: Any) -> None:  # type: ignore[misc]  # Ray awaits it
        """Load the model, and begin to serve."""
        self.config = llm_config
        self.server = await asyncio.to_thread(self.make, options_of(llm_config))
        app: Any = self.server.app
        self._running = app.router.lifespan_context(app)
        await self._running.__aenter__()

    @staticmethod
    def make(options: Mapping[str, Any]) -> Server:
        """Return the server of these options of `eyas serve`."""
        raise NotImplementedError

    async def start(self) -> None:
        """Do nothing: a replica serves when it has been made."""

    async def __serve_build_asgi_app__(self) -> App:
        return self.server.app

    async def check_health(self) -> None:
        """Raise an exception if the replica is to be replaced."""
        self.server.check()

    async def llm_config(self) -> Any:
        """Return the configuration that it was made of."""
        return self.config

    @classmethod
    def get_deployment_options(cls, llm_config: Any) -> dict[str, Any]:
        """Return the options of `ray.serve.deployment`.

        They are the configuration's own. Ray reserves the resources of a replica as one bundle, unless the
        configuration names several.
        """
        options = dict(llm_config.deployment_config)
        actor = dict(options.get("ray_actor_options", {}))
        placement = llm_config.placement_group_config or {}
        own = {"CPU": actor.get("num_cpus", 1), "GPU": actor.get("num_gpus", 0)}
        if llm_config.runtime_env:
            actor["runtime_env"] = {**actor.get("runtime_env", {}), **llm_config.runtime_env}
        return options | {
            "ray_actor_options": actor,
            "placement_group_bundles": placement.get("placement_group_bundles", [own]),
            "placement_group_strategy": placement.get("placement_group_strategy", "STRICT_PACK"),
        }

    async def chat(self, request: Any, raw_request_info: Any = None) -> Answers:
        """Return the answer to a chat: one object, or the events of a stream."""
        return self._answer("/v1/chat/completions", "ChatCompletion", request, raw_request_info)

    async def completions(self, request: Any, raw_request_info: Any = None) -> Answers:
        """Return the completion of a text: one object, or the events of a stream."""
        return self._answer("/v1/completions", "Completion", request, raw_request_info)

    async def tokenize(self, request: Any, raw_request_info: Any = None) -> Answers:
        """Return the token ids of a text or of a chat."""
        return self._answer("/tokenize", "Tokenize", request, raw_request_info)

    async def detokenize(self, request: Any, raw_request_info: Any = None) -> Answers:
        """Return the text of token ids."""
        return self._answer("/detokenize", "Detokenize", request, raw_request_info)

    async def _answer(self, path: str, kind: str, request: Any, info: Any) -> Answers:
        """Yield the application's answer to a request, in the classes of `ray.serve.llm`."""
        from ray.llm._internal.serve.core.configs import openai_api_models as models

        body = request.model_dump(mode="json", exclude_unset=True)
        headers = info.headers if info is not None else {}
        async with aclosing(asked(self.server.app, path, body, headers)) as messages:
            status = (await anext(messages))["status"]
            if status == HTTPStatus.OK and body.get("stream"):
                async for event in events(messages):
                    yield event
                return
            content = json.loads(b"".join([message.get("body", b"") async for message in messages]))
        if status != HTTPStatus.OK:
            error = content["error"]
            yield models.ErrorResponse(error=models.ErrorInfo(
                message=error["message"], type=str(error["type"]), param=error.get("param"), code=status
            ))  # fmt: skip
            return
        yield getattr(models, f"{kind}Response")(**content)


async def events(messages: AsyncIterator[Message]) -> AsyncGenerator[str, None]:
    """Yield the events of a stream, each whole, from the parts in which they are sent."""
    kept = ""
    async for message in messages:
        kept += message.get("body", b"").decode()
        *whole, kept = kept.split(END)
        for event in whole:
            yield event + END
    if kept:
        yield kept


async def asked(
    app: App, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
) -> AsyncGenerator[Message, None]:
    """Post a body to an ASGI application in this process, and yield the messages of its answer.

    Closing the iterator tells the application that the client has gone.
    """
    own = [(b"content-type", b"application/json"), (b"host", b"localhost")]
    passed = [
        (name.lower().encode(), value.encode()) for name, value in headers.items() if name.lower() not in OWN_HEADERS
    ]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": own + passed,
        "client": ("127.0.0.1", 0), "server": ("localhost", 80),
    }  # fmt: skip
    parts: list[Message] = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    answer: asyncio.Queue[Message | None] = asyncio.Queue()
    gone = asyncio.Event()

    async def receive() -> Message:
        if parts:
            return parts.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    task = asyncio.ensure_future(app(scope, receive, answer.put))
    task.add_done_callback(lambda _: answer.put_nowait(None))
    try:
        while (message := await answer.get()) is not None:
            yield message
        await task
    finally:
        gone.set()
        await asyncio.wait([task])
