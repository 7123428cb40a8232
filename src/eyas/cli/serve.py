"""`eyas serve`: an OpenAI-compatible server."""

from __future__ import annotations

from eyas import elsewhere
from eyas.cli._adapt import AdaptOptions
from eyas.cli._load import need_packages
from eyas.cli._options import DraftOptions, MethodOptions, TargetOptions
from eyas.cli._serving import ServeArguments, ServeOptions, loaded_app

__all__ = ["ServeArguments", "command", "loaded_app"]

GROUP = "Answers"
EXAMPLES = """
eyas serve  # the embedded model, on http://127.0.0.1:8000
eyas serve --target MODEL --draft HEAD --rows 16 --port 8080
"""
NOTES = ("Clients of OpenAI's interface use it with base_url http://HOST:PORT/v1; the page at / shows every cycle.",)


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
