"""uvicorn with the end of a server: SIGTERM lets running answers end, a dead engine ends the process."""

from __future__ import annotations

import logging
import socket
import sys
import time
from dataclasses import dataclass
from types import FrameType

import uvicorn
from fastapi import FastAPI

from eyas.serve.access import JsonLines
from eyas.serve.service import Service

__all__ = ["Address", "serve"]

FLUSH_SECONDS = 5  # for responses that are generated but not yet read
log = logging.getLogger("eyas.serve")


@dataclass(frozen=True)
class Address:
    """Where a server listens."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any that is free


class Server(uvicorn.Server):
    """Ends when it is idle after SIGTERM or Ctrl-C, or after `drain_seconds`; at once at a second signal and when the engine has failed."""

    def __init__(self, config: uvicorn.Config, service: Service, drain_seconds: float) -> None:
        super().__init__(config)
        self.service = service
        self.drain_seconds = drain_seconds
        self._ends_at: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The handler of SIGTERM and SIGINT."""
        if self._ends_at is not None:
            self.should_exit = self.force_exit = True
            return
        self._ends_at = time.monotonic() + self.drain_seconds
        self.service.engine.drain()
        running, waiting = self.service.engine.load
        log.info("shutting down: %d sequences in flight and %d that wait may end within %g s", running, waiting, self.drain_seconds)

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second; True ends the server."""
        engine = self.service.engine
        late = self._ends_at is not None and time.monotonic() > self._ends_at
        if engine.error is not None or late or (engine.draining and engine.idle):
            self.should_exit = True
        return await super().on_tick(counter)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say where."""
        await super().startup(sockets)
        for server in self.servers:
            for sock in server.sockets:
                host, port = sock.getsockname()[:2]
                log.info("serving %s on http://%s:%d", self.service.settings.name, f"[{host}]" if ":" in host else host, port)


def serve(app: FastAPI, service: Service, address: Address, *, drain_seconds: float = 60.0, json_logs: bool = False) -> None:
    """Serve until a signal ends it.

    Raises:
        Exception: what ended the engine.
    """
    set_up_logs(json_logs)
    config = uvicorn.Config(
        app,
        host=address.host,
        port=address.port,
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=FLUSH_SECONDS,
    )
    Server(config, service, drain_seconds).run()
    if service.engine.error is not None:
        raise service.engine.error


def set_up_logs(as_json: bool) -> None:
    """Log to stderr: eyas from INFO on, the libraries their warnings."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if as_json else logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for name, level in (("eyas.serve", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
