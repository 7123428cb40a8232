"""Request ids, and one line in the log for each request: never what it says."""

from __future__ import annotations

import json
import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["AccessLog", "JsonLines", "request_id"]

ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
log = logging.getLogger("eyas.serve.access")


def request_id(scope: Scope) -> str:
    """Return the id of the request in this scope: the client's own, where it sends a usable one."""
    given: str = scope["state"]["request_id"]
    return given


class AccessLog:
    """Gives every request an id, returns it as `x-request-id`, and logs method, path, status, time and id."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        identity = given if ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = identity
        began, status = time.monotonic(), 499  # if nothing is sent, the client has gone

        async def marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = identity
            await send(message)

        try:
            await self.app(scope, receive, marked)
        finally:
            fields = {
                "method": scope["method"],
                # without line breaks that a client chose
                "path": scope.get("raw_path", b"").decode("ascii", "backslashreplace"),
                "status": status,
                "ms": round(1000 * (time.monotonic() - began), 1),
                "request_id": identity,
            }
            log.info("%(method)s %(path)s %(status)d %(ms).1f ms %(request_id)s", fields, extra={"fields": fields})


class JsonLines(logging.Formatter):
    """A log of one JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as JSON: its fields, or its message."""
        entry = {"time": self.formatTime(record), "level": record.levelname, "logger": record.name}
        fields = getattr(record, "fields", None)
        entry.update(fields if fields is not None else {"message": record.getMessage()})
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)
