"""`eyas serve` on several processes or machines: its server as a replica of Ray Serve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from eyas.cli.serve import ServeArguments, loaded_app
from eyas.cli.tools import Here, UsageError, cores_for, note, wants_gpu
from eyas.errors import OptionError, near

if TYPE_CHECKING:
    from fastapi import FastAPI

    from eyas.serve.service import Service
    from eyas_ray.options import Fleet

# `eyas_ray.serving:build_app` is the import path for `serve deploy`, `eyas_ray.serving:EyasLLMServer` the one for
# `server_cls` of ray.serve.llm
__all__ = ["build_app", "serve_fleet"]

PLACES = ("host", "port")  # Ray's proxies listen, not the replicas


def __getattr__(name: str) -> Any:
    """Return the class for `ray.serve.llm` when it is asked for: nothing else needs its module."""
    if name == "EyasLLMServer":
        return server_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class ReplicaServer:
    """The server of `eyas serve` in a process of Ray's: `replica.Server`."""

    def __init__(self, app: FastAPI, service: Service) -> None:
        self.app = app
        self.service = service

    def check(self) -> None:
        """Raise the error that has ended the engine."""
        if self.service.engine.error is not None:
            raise self.service.engine.error

    def figures(self) -> dict[str, float]:
        """Return the sequences in flight and in the queue, and the rows."""
        running, waiting = self.service.engine.load
        return {"running": running, "waiting": waiting, "rows": self.service.settings.rows}

    def metrics(self) -> str:
        """Return the text of /metrics."""
        return self.service.metrics.text().decode()

    async def change_head(self, source: str) -> None:
        """Let the head of a folder or hub id draft from the next cycle on."""
        from eyas.serve.info import change_head

        await change_head(self.service, source)


@dataclass(frozen=True)
class Maker:
    """Makes the server of these options, in the process that it is sent to."""

    arguments: ServeArguments

    def __call__(self) -> ReplicaServer:
        from eyas.serve.server import set_up_logs

        set_up_logs(self.arguments.server.json_logs)
        return ReplicaServer(*loaded_app(self.arguments))


def serve_fleet(arguments: ServeArguments) -> None:
    """Serve with several replicas on this machine until a signal ends it."""
    from eyas.serve.server import bound
    from eyas_ray.fleet import local_fleet, run_until_signal

    server = arguments.server
    with bound(server.host, server.port) as listening:  # Ray names no address that is taken
        port = listening.getsockname()[1]
    fleet = fleet_of(arguments)
    with local_fleet(Here(Maker(arguments)), fleet, server.host, port):
        note(f"serving with {fleet.replicas} replicas on http://{server.host}:{port}")
        run_until_signal()
        note(f"shutting down: running answers may end within {server.drain:g} s")


def fleet_of(arguments: ServeArguments) -> Fleet:
    """Return the fleet that the options describe, with this machine's cores and GPUs shared among its replicas."""
    from eyas_ray.options import Fleet

    server = arguments.server
    fleet = Fleet(
        replicas=server.replicas or 1,
        max_replicas=server.max_replicas,
        rows=server.rows,
        queue=server.queue,
        drain=server.drain,
        gpus=float(wants_gpu(arguments.model.device)),
    )
    return replace(fleet, cpus=cores_for(fleet.max_replicas or fleet.replicas))


def build_app(args: Mapping[str, Any]) -> Any:
    """Return the application for `serve deploy`.

    Args:
        args: the options of `eyas serve` by name, such as {"target": ..., "draft": ..., "rows": 16}, and the
            fields of `eyas_ray.options.Fleet`, such as {"replicas": 2, "max_replicas": 8, "gpus": 1}.

    Raises:
        EyasError: an option that does not exist, or a value that is not possible.
    """
    from eyas_ray.fleet import application
    from eyas_ray.options import Fleet

    names = {field.name for field in fields(Fleet)} - {"draft"}
    serving = {name: value for name, value in args.items() if name not in names - {"rows", "queue", "drain"}}
    arguments = arguments_of(serving)
    server = arguments.server
    own = {name: value for name, value in args.items() if name in names}
    fleet = Fleet(**{"rows": server.rows, "queue": server.queue, "drain": server.drain, **own})
    return application(Maker(arguments), fleet)


@cache
def server_class() -> type:
    """Return the class that `server_cls` of `ray.serve.llm` names, as `eyas_ray.serving:EyasLLMServer`.

    It is made when it is asked for: its base class imports Ray.
    """
    from eyas_ray.llm_server import LLMServer

    class EyasLLMServer(LLMServer):
        """`eyas serve` under the ingress of `ray.serve.llm`."""

        @staticmethod
        def make(options: Mapping[str, Any]) -> ReplicaServer:
            """See `LLMServer`."""
            return Maker(arguments_of(options))()

    return EyasLLMServer


def arguments_of(options: Mapping[str, Any]) -> ServeArguments:
    """Return the options of `eyas serve` from their names and values.

    Raises:
        UsageError: `eyas serve` has no such option, or not in a fleet, or it does not take this value.
    """
    import cyclopts

    from eyas.cli.tools import parse

    if refused := next((name for name in options if name in PLACES), None):
        raise UsageError(f"{refused!r} is not an option of a replica: http_options of the configuration has it")
    tokens = ["serve", *(token for name, value in options.items() for token in _tokens(name, value))]
    try:
        _, bound = parse(tokens)
    except cyclopts.UnknownOptionError as error:
        known = [field.name for kind in ServeArguments.kinds() for field in fields(kind)]
        name = (error.token.keyword or "").lstrip("-").replace("-", "_")
        raise OptionError(f"there is no option {name!r} of eyas serve; {near(name, known)}") from error
    except cyclopts.CycloptsError as error:
        raise OptionError(str(error).splitlines()[0]) from error
    return ServeArguments(**bound.arguments)


def _tokens(name: str, value: Any) -> list[str]:
    """Return an option as it is written on the command line."""
    option = f"--{name.replace('_', '-')}"
    if isinstance(value, list | tuple):
        return [token for one in value for token in _tokens(name, one)]
    if value is None or value is False:
        return []
    return [option] if value is True else [f"{option}={value}"]
