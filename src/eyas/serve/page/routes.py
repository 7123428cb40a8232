"""The routes of the page: `/` and the files that it loads. They need no API key, as they hold
nothing but the page."""

from __future__ import annotations

from fastapi import APIRouter, HTTPException
from fastapi.responses import Response

from eyas.serve.page import FOLDER, MEDIA_TYPES, SERVED_POLICY

HEADERS = {
    "content-security-policy": SERVED_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # another version of eyas has other files
}

router = APIRouter(include_in_schema=False)


@router.api_route("/", methods=["GET", "HEAD"])
def index() -> Response:
    """Answer GET /: the page."""
    return file("index.html")


@router.get("/page/{name}")
def file(name: str) -> Response:
    """Answer GET of a file of the page. Raise HTTPException 404 for other names."""
    path = FOLDER / name
    if path.suffix not in MEDIA_TYPES or path.parent != FOLDER or not path.is_file():
        raise HTTPException(404, f"the page has no file {name!r}")
    return Response(path.read_bytes(), media_type=MEDIA_TYPES[path.suffix], headers=HEADERS)
