"""`eyas serve`: an OpenAI-compatible server, in the command's own process or in several of Ray's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts.types import NonNegativeInt, PositiveFloat, PositiveInt

from eyas import elsewhere
from eyas.cli._errors import UsageError
from eyas.cli._load import load_adapted, need_packages, note_no_head
from eyas.cli._options import AdaptOptions, DraftOptions, MethodOptions, TargetOptions, option_group

if TYPE_CHECKING:
    from fastapi import FastAPI

    from eyas.api import LLM
    from eyas.recall import Pools
    from eyas.serve.service import Service
    from eyas.serve.settings import Settings

GROUP = "Answers"
EXAMPLES = """
eyas serve  # the embedded model, on http://127.0.0.1:8000
eyas serve --target MODEL --draft HEAD --rows 16 --port 8080
"""
NOTES = ("Clients of OpenAI's interface use it with base_url http://HOST:PORT/v1; the page at / shows every cycle.",)
KEY_VARIABLE, ADMIN_VARIABLE = "EYAS_API_KEY", "EYAS_ADMIN_KEY"


@option_group
class ServeOptions:
    """Where the server listens, and its limits."""

    host: Annotated[str, "Server", "ADDRESS"] = "127.0.0.1"
    """Address to listen at; 0.0.0.0 listens to the whole network."""
    port: Annotated[NonNegativeInt, "Server", "N"] = 8000
    """Port to listen at; 0 takes a free one."""
    name: Annotated[str | None, "Server", "NAME"] = None
    """The model's name for clients. Default: the last part of the target's."""
    api_key: Annotated[tuple[str, ...], "Server", "KEY"] = ()
    """Key that clients must send. May be given several times. Better: set EYAS_API_KEY."""
    admin_key: Annotated[str | None, "Server", "KEY"] = None
    """Key that may replace the draft head (POST /v1/draft). Better: set EYAS_ADMIN_KEY."""
    cors_origin: Annotated[tuple[str, ...], "Server", "URL"] = ()
    """Let web pages of this origin use the server. May be given several times."""
    allowed_host: Annotated[tuple[str, ...], "Server", "NAME"] = ()
    """Accept this name in a request's Host header. May be given several times. Default: any name; only this
    machine's names if the server listens to this machine alone and needs no key."""
    api_docs: Annotated[bool, "Server"] = False
    """Show FastAPI's page of the interface at /docs; a browser loads its scripts from the network."""
    json_logs: Annotated[bool, "Server"] = False
    """Log one JSON object a line."""
    rows: Annotated[PositiveInt, "Limits", "N"] = 8
    """Sequences to decode together."""
    queue: Annotated[NonNegativeInt, "Limits", "N"] = 256
    """Sequences that may wait. Further requests get status 429."""
    prefill_budget: Annotated[PositiveInt | Literal["auto"], "Limits", "TOKENS|auto"] = "auto"
    """Prompt tokens to read between two cycles, so that a long prompt does not delay other answers. auto: as
    many as take one and a half cycles."""
    max_model_len: Annotated[PositiveInt | None, "Limits", "TOKENS"] = None
    """Longest prompt with its answer, in tokens. Default: the target's context."""
    max_tokens: Annotated[PositiveInt, "Limits", "TOKENS"] = 4096
    """Cut answers after N tokens, even if a request asks for more."""
    max_body: Annotated[PositiveFloat, "Limits", "MIB"] = 16.0
    """Largest body of a request, images included."""
    remember: Annotated[NonNegativeInt, "Limits", "N"] = 256
    """Responses to keep in memory, for clients that continue by the id of a response or an item; 0 keeps
    none."""
    recall: Annotated[PositiveInt | None, "Method", "MIB"] = None
    """Draft from earlier answers and from texts sent to /v1/corpora, too. Each key gets this much memory.
    Answers stay the same."""
    recall_minutes: Annotated[PositiveFloat | None, "Method", "N"] = None
    """Forget texts after N minutes without use."""
    recall_shared: Annotated[bool, "Method"] = False
    """Draft from the texts of all keys. The speed of an answer can then reveal the texts of others."""
    recall_folder: Annotated[str | None, "Method", "FOLDER"] = None
    """Write the texts to this folder when the server ends, and read them at the next start."""
    timeout: Annotated[PositiveFloat, "Limits", "SECONDS"] = 600.0
    """Give up a request after this time."""
    drain: Annotated[PositiveFloat, "Limits", "SECONDS"] = 60.0
    """Time for running answers to end after SIGTERM."""
    replicas: Annotated[PositiveInt | None, "Server", "N"] = None
    """Serve with N processes at one address, on Ray (docs/guide/scale.md); each has --rows of its own."""
    max_replicas: Annotated[PositiveInt | None, "Server", "N"] = None
    """Start further replicas under load, up to N."""


@dataclass(frozen=True)
class ServeArguments:
    """The options of `eyas serve`, by the class that declares them."""

    server: ServeOptions
    adapt: AdaptOptions
    model: TargetOptions
    draft: DraftOptions
    options: Mapping[str, Any]

    @staticmethod
    def kinds() -> tuple[type, ...]:
        """Return the classes whose fields are options."""
        return ServeOptions, AdaptOptions, TargetOptions, DraftOptions


def command(
    *, server: ServeOptions, adapt: AdaptOptions, model: TargetOptions, draft: DraftOptions, options: MethodOptions
) -> None:
    """Serve a model to clients of OpenAI's interface."""
    need_packages("serve", "serve", "fastapi", "uvicorn", "prometheus_client")
    from eyas.serve.server import bound, serve

    arguments = ServeArguments(server, adapt, model, draft, options)
    if server.replicas or server.max_replicas:
        need_packages("serve --replicas", "ray", "ray", "mmh3")
        elsewhere.part("fleet", "eyas serve --replicas").serve_fleet(arguments)
        return
    with bound(server.host, server.port) as listening:  # before the model is loaded, which takes a while
        app, service = loaded_app(arguments)
        serve(app, service, listening, drain_seconds=server.drain, json_logs=server.json_logs)


def loaded_app(arguments: ServeArguments) -> tuple[FastAPI, Service]:
    """Load the model, warm it up, and return the app and its service. Raise UsageError for an empty key."""
    from eyas.serve.app import make_app
    from eyas.serve.auth import allowed_hosts
    from eyas.serve.service import Service

    server, adapt = arguments.server, arguments.adapt
    keys = [*server.api_key, *filter(None, [os.environ.get(KEY_VARIABLE)])]
    if not all(key.strip() for key in keys):
        raise UsageError("an --api-key is empty")
    llm = load_adapted(adapt, arguments.model, arguments.draft, arguments.options)
    note_no_head(llm, arguments.model, arguments.draft)
    learning = elsewhere.find_part("adapt")
    heads = None if learning is None else learning.Heads(llm, adapt.adapt_save)
    service = Service(llm, settings_of(server, llm), pools_of(server), heads)
    service.warm_up()
    hosts = allowed_hosts(server.host, server.allowed_host, bool(keys))
    return make_app(service, keys, server.cors_origin, hosts, server.api_docs), service


def pools_of(options: ServeOptions) -> Pools | None:
    """Return the pools of earlier texts; None without --recall. Raise UsageError for options that need it."""
    from eyas.recall import Pools

    if options.recall is None:
        if options.recall_minutes or options.recall_shared or options.recall_folder:
            raise UsageError("--recall-minutes, --recall-shared and --recall-folder need --recall MIB")
        return None
    age = options.recall_minutes and 60 * options.recall_minutes
    folder = Path(options.recall_folder) if options.recall_folder else None
    return Pools(options.recall * 2**20, age, shared=options.recall_shared, folder=folder)


def settings_of(options: ServeOptions, llm: LLM) -> Settings:
    """Return the server's settings: the options, with the context of the target as the upper limit."""
    from eyas.serve.settings import Settings

    name = options.name or (llm.target.name or "model").rstrip("/").rpartition("/")[2]
    context = min(options.max_model_len or llm.target.context, llm.target.context)
    return Settings(
        name,
        rows=options.rows,
        queue=options.queue,
        prefill_budget=options.prefill_budget,
        max_model_len=context,
        max_tokens=min(options.max_tokens, context),
        timeout=options.timeout,
        max_body_bytes=int(options.max_body * 2**20),
        remembered=options.remember,
        admin_key=options.admin_key or os.environ.get(ADMIN_VARIABLE) or None,
    )
