"""`eyas serve`: an OpenAI-compatible server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts.types import NonNegativeInt, PositiveFloat, PositiveInt

from eyas.cli._adapt import AdaptOptions, load_adapted
from eyas.cli._errors import UsageError
from eyas.cli._load import need_packages, note_no_head
from eyas.cli._options import DraftOptions, MethodOptions, TargetOptions, option_group

if TYPE_CHECKING:
    from eyas.api import LLM
    from eyas.recall import Pools
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
    """0.0.0.0 listens to the whole network."""
    port: Annotated[NonNegativeInt, "Server", "N"] = 8000
    """0: any that is free."""
    name: Annotated[str | None, "Server", "NAME"] = None
    """The model's name for clients. Default: the last part of the target's."""
    api_key: Annotated[tuple[str, ...], "Server", "KEY"] = ()
    """A key that clients need; may be given several times. Better: in the environment, as EYAS_API_KEY."""
    admin_key: Annotated[str | None, "Server", "KEY"] = None
    """The key that may replace the draft head (POST /v1/draft). Better: in the environment, as EYAS_ADMIN_KEY."""
    cors_origin: Annotated[tuple[str, ...], "Server", "URL"] = ()
    """Let web pages of this origin use the server; may be given several times."""
    allowed_host: Annotated[tuple[str, ...], "Server", "NAME"] = ()
    """Answer to this name in a request's Host header; may be given several times. Default: any, but only
    this machine's own names where the server listens to this machine alone and needs no key."""
    api_docs: Annotated[bool, "Server"] = False
    """Show FastAPI's page of the interface at /docs; a browser loads its scripts from the network."""
    json_logs: Annotated[bool, "Server"] = False
    """Log one JSON object a line."""
    rows: Annotated[PositiveInt, "Limits", "N"] = 8
    """Sequences that are decoded together."""
    queue: Annotated[NonNegativeInt, "Limits", "N"] = 256
    """Sequences that may wait; a request beyond them gets status 429."""
    prefill_budget: Annotated[PositiveInt | Literal["auto"], "Limits", "TOKENS|auto"] = "auto"
    """Prompt tokens that are read between two cycles, so that a long prompt does not hold up other
    answers; auto: for each prompt as many as take one and a half cycles."""
    max_model_len: Annotated[PositiveInt | None, "Limits", "TOKENS"] = None
    """Tokens of a prompt and its answer. Default: the target's context."""
    max_tokens: Annotated[PositiveInt, "Limits", "TOKENS"] = 4096
    """Tokens of one answer."""
    max_body: Annotated[PositiveFloat, "Limits", "MIB"] = 16.0
    """The largest body of a request; images are in it."""
    remember: Annotated[NonNegativeInt, "Limits", "N"] = 256
    """Responses whose conversation is kept in memory, for clients that go on by the id of a response or an item;
    0: none."""
    recall: Annotated[PositiveInt | None, "Speed", "MIB"] = None
    """Draft also from earlier answers and from texts sent to /v1/corpora. Each key has so much memory for them.
    Answers stay the same."""
    recall_minutes: Annotated[PositiveFloat | None, "Speed", "N"] = None
    """Forget texts that were not used for N minutes."""
    recall_shared: Annotated[bool, "Speed"] = False
    """Draft from the texts of all keys; how fast an answer comes then tells what others have asked."""
    recall_folder: Annotated[str | None, "Speed", "FOLDER"] = None
    """Keep the texts there from one start to the next; they are written when the server ends."""
    timeout: Annotated[PositiveFloat, "Limits", "SECONDS"] = 600.0
    """A request is given up after this time."""
    drain: Annotated[PositiveFloat, "Limits", "SECONDS"] = 60.0
    """After SIGTERM, running answers have this time to end."""


def command(
    *, server: ServeOptions, adapt: AdaptOptions, model: TargetOptions, draft: DraftOptions, options: MethodOptions
) -> None:
    """Serve a model to clients of OpenAI's interface."""
    need_packages("serve", "serve", "fastapi", "uvicorn", "prometheus_client")
    from eyas.adapt import Heads
    from eyas.serve.app import make_app
    from eyas.serve.hosts import allowed_hosts
    from eyas.serve.server import bound, serve
    from eyas.serve.service import Service

    keys = [*server.api_key, *filter(None, [os.environ.get(KEY_VARIABLE)])]
    if not all(key.strip() for key in keys):
        raise UsageError("an --api-key is empty")
    with bound(server.host, server.port) as listening:  # before the model is loaded, which takes a while
        llm = load_adapted(adapt, model, draft, options)
        note_no_head(llm, model, draft)
        service = Service(llm, settings_of(server, llm), pools_of(server), Heads(llm, adapt.adapt_save))
        service.warm_up()
        hosts = allowed_hosts(server.host, server.allowed_host, bool(keys))
        app = make_app(service, keys, server.cors_origin, hosts, server.api_docs)
        serve(app, service, listening, drain_seconds=server.drain, json_logs=server.json_logs)


def pools_of(options: ServeOptions) -> Pools | None:
    """Return the texts that requests are drafted from; None if nothing is remembered."""
    from eyas.recall import Pools

    if options.recall is None:
        if options.recall_minutes or options.recall_shared or options.recall_folder:
            raise UsageError("--recall-minutes, --recall-shared and --recall-folder need --recall MIB")
        return None
    age = options.recall_minutes and 60 * options.recall_minutes
    folder = Path(options.recall_folder) if options.recall_folder else None
    return Pools(options.recall * 2**20, age, shared=options.recall_shared, folder=folder)


def settings_of(options: ServeOptions, llm: LLM) -> Settings:
    """Return the settings of a server for this model."""
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
