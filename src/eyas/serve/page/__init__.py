"""The page of the server, as files; and the same view as one file that needs no other file (`eyas generate --view`).

The files are served as they are: no build step, no library, nothing from the network. Texts of models and users
enter the page as text nodes only; under `SERVED_POLICY` no inline script runs and no markup is parsed. `one_file`
puts the modules into one script: each import is on one line, and `export` comes before the exported name. This
module knows no web framework.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["FOLDER", "MEDIA_TYPES", "SERVED_POLICY", "one_file"]

FOLDER = Path(__file__).parent
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
NO_MARKUP = "require-trusted-types-for 'script'; trusted-types 'none'"
SERVED_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    f"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; {NO_MARKUP}"
)
STYLES = ("base.css", "chat.css", "cycle.css")
IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./(.+)\.js";$', re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const) (\w+))", re.MULTILINE)


def one_file(data: Mapping[str, Any]) -> str:
    """Return an HTML page that shows one answer: prompt, target, method, tau, seconds, and its cycles."""
    style = "\n".join(_read(name) for name in STYLES)
    script = "\n".join(_modules("file"))
    policy = f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'; form-action 'none'; {NO_MARKUP}"
    parts = {"policy": policy, "style": style, "script": script, "data": _json(data)}
    return re.sub(r"@(\w+)@", lambda place: parts[place[1]], _read("file.html"))


def _modules(entry: str, done: set[str] | None = None) -> list[str]:
    """Return a module and those that it imports, as functions that return their exports."""
    done = set() if done is None else done
    done.add(entry)
    source = _read(f"{entry}.js")
    needed = [part for _, name in IMPORT.findall(source) if name not in done for part in _modules(name, done)]
    body = EXPORT.sub("", IMPORT.sub(r"const \1 = \2_js;", source))
    return [*needed, f"const {entry}_js = (() => {{\n{body}\nreturn {{ {', '.join(EXPORT.findall(source))} }};\n}})();"]


def _read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """Return the name of an inline script or style in a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _json(data: Mapping[str, Any]) -> str:
    """Return JSON for a script element: a text in it cannot end the element."""
    return json.dumps(data, allow_nan=False).replace("<", "\\u003c")
