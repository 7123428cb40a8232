"""uvicorn with the end of a server: SIGTERM lets running answers end, a dead engine ends the process."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from types import FrameType

import uvicorn
from fastapi import FastAPI

from eyas.errors import OptionError
from eyas.serve.http import JsonLines
from eyas.serve.service import Service

FLUSH_SECONDS = 5  # for responses that are generated but not yet read
# of a connection: longer than its other end keeps it, which meets a reset else (Google's proxies: 600)
IDLE_SECONDS = 620
log = logging.getLogger("eyas.serve")


def bound(host: str, port: int) -> socket.socket:
    """Return a socket at this address, not listening yet; port 0 is any that is free."""
    made = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except (OSError, OverflowError) as error:
        if made is not None:
            made.close()
        reason = getattr(error, "strerror", None) or error
        raise OptionError(f"cannot listen on {host} port {port} ({reason}): choose another --host or --port") from error
    return made


class Server(uvicorn.Server):
    """Ends after SIGTERM or Ctrl-C, and when the engine has failed. Running answers have `drain_seconds` to end. A
    second signal gives them up; a third one waits for nothing."""

    def __init__(self, config: uvicorn.Config, service: Service, drain_seconds: float) -> None:
        super().__init__(config)
        config.timeout_keep_alive = IDLE_SECONDS
        self.service = service
        self.drain_seconds = drain_seconds
        self._ends_at: float | None = None
        self._signals = 0
        self._announced = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, cancel at the second, exit at the third."""
        self._signals += 1
        now = time.monotonic()
        if self._signals == 1:
            self._ends_at = now + self.drain_seconds
            self.service.engine.drain()
        elif self._signals == 2:
            self._ends_at = now
        else:
            os._exit(1)  # uvicorn's own way out logs tracebacks, and waits for the engine's thread

    async def on_tick(self, counter: int) -> bool:
        """Return True to end the server; called ten times a second."""
        engine = self.service.engine
        if self._signals and not self._announced:
            self._announced = True
            running, waiting = engine.load
            log.info(
                "shutting down: %d sequences in flight and %d that wait may end within %g s",
                running,
                waiting,
                self.drain_seconds,
            )
        if self._ends_at is not None and time.monotonic() > self._ends_at:
            engine.halt()
        if engine.error is not None or (engine.draining and engine.idle):
            self.should_exit = True
        return await super().on_tick(counter)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and log the addresses."""
        await super().startup(sockets)
        for sock in sockets or []:
            host, port = sock.getsockname()[:2]
            log.info(
                "serving %s on http://%s:%d", self.service.settings.name, f"[{host}]" if ":" in host else host, port
            )


def serve(
    app: FastAPI, service: Service, listening: socket.socket, *, drain_seconds: float, json_logs: bool = False
) -> None:
    """Serve until a signal ends it. Raise the error that ended the engine."""
    set_up_logs(json_logs)
    config = uvicorn.Config(
        app, access_log=False, log_config=None, server_header=False, timeout_graceful_shutdown=FLUSH_SECONDS
    )
    Server(config, service, drain_seconds).run([listening])
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
