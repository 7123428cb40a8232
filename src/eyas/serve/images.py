"""Images in messages, as OpenAI's clients send them: {"type": "image_url", "image_url": {"url":
"data:image/png;base64,..."}}.

The server fetches nothing and reads no file for a client: that would let clients see places that only the
server can reach.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping, Sequence
from typing import Any

from eyas.serve.errors import bad_request

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MOST_PIXELS = 2**25  # limit for all images of a request: a small file may hold a huge image
LONGEST_SIDE = 50  # over the shorter side: processors that give the shorter side a fixed length make a thin image huge
MOST_IMAGES = 64  # limit for a request: a processor makes a small image as large as a large one
EXAMPLE = '{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}'
NAMES_A_SOURCE = ("image", "video", "audio")  # parts that a processor of transformers would read from a file or address


def holds_images(messages: Sequence[Any]) -> bool:
    """Return whether any message has an image."""
    contents = (message.get("content") for message in messages if isinstance(message, Mapping))
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return any(isinstance(part, Mapping) and part.get("type") == "image_url" for part in parts)


def with_images(messages: Sequence[Any]) -> list[Any]:
    """Return the messages with images of Pillow in place of their data: URLs."""
    images: list[Any] = []

    def converted(part: Any, named: str) -> Any:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in NAMES_A_SOURCE:
            raise bad_request(f"{named} is of type {kind!r}: images come as {EXAMPLE}", "messages")
        if kind != "image_url":
            return part
        if len(images) >= MOST_IMAGES:
            raise bad_request(f"a request may have {MOST_IMAGES} images: send fewer", "messages")
        image = _open(_url_of(part, named), named)
        if max(image.size) > LONGEST_SIDE * min(image.size):
            raise bad_request(f"{named}: an image may be at most {LONGEST_SIDE} times as long as wide", "messages")
        images.append(image)
        if sum(one.width * one.height for one in images) > MOST_PIXELS:
            raise bad_request(f"the images of a request may have {MOST_PIXELS} pixels: send smaller ones", "messages")
        try:
            image.load()
        except Exception:  # as in _open
            raise bad_request(f"{named}: its image is broken", "messages") from None
        return {"type": "image", "image": image}

    made = []
    for number, message in enumerate(messages, start=1):
        if isinstance(message, Mapping) and isinstance(message.get("content"), list):
            parts = enumerate(message["content"], start=1)
            content = [converted(part, f"part {place} of message {number}") for place, part in parts]
            message = {**message, "content": content}
        made.append(message)
    return made


def _url_of(part: Mapping[str, Any], named: str) -> str:
    value = part.get("image_url")
    url = value.get("url") if isinstance(value, Mapping) else value
    if not isinstance(url, str):
        raise bad_request(f"{named} has no image: write {EXAMPLE}", "messages")
    return url


def _open(url: str, named: str) -> Any:
    """Return the image of a data: URL. Only its header is read, so its size is known before memory is taken for it."""
    try:
        from PIL import Image
    except ImportError:
        raise bad_request("this server cannot read images: the package pillow is not installed", "messages") from None
    head, _, data = url.partition(",")
    if not head.startswith("data:") or not head.endswith(";base64"):
        raise bad_request(f"{named}: this server fetches no images, so they come as {EXAMPLE}", "messages")
    try:
        return Image.open(io.BytesIO(base64.b64decode(data.encode(), validate=True)), formats=FORMATS)
    except binascii.Error:
        raise bad_request(f"{named}: its data is not base64", "messages") from None
    except Exception:  # Pillow's plugins raise whatever a broken file makes them
        raise bad_request(f"{named} is not an image that can be read: send {', '.join(FORMATS)}", "messages") from None
