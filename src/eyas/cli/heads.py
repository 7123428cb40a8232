"""`eyas heads`: which published heads fit a model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from eyas.cli._load import quiet
from eyas.cli._options import AS_JSON, Fields

if TYPE_CHECKING:
    from eyas.named import FittingHead

GROUP = "Heads"
EXAMPLES = """
eyas heads Qwen/Qwen3-8B  # the heads that --draft auto would try, in this order
eyas heads FOLDER  # a fine-tune: also the heads of its base model, and models for its family
eyas heads  # all heads that are listed
"""
NOTES = (
    "Nothing is fetched but the config.json of a hub id. Heads in the list have not been tried: docs/reference/head_formats.md.",
)


def command(
    model: Annotated[str | None, "Model", Parameter(help="Folder or hub id of the target. Default: all heads.")] = None,
    /,
    *,
    as_json: AS_JSON = False,
) -> None:
    """List the published draft heads that fit a model."""
    from eyas import named

    if model is None:
        found = [named.FittingHead(head, f"{head.source} lists for {head.target}") for head in named.listed_heads()]
    else:
        found = _fitting(model)
    if as_json:
        heads = [{"head": fit.head.head, "method": fit.head.method, "why": fit.why} for fit in found]
        print(json.dumps({"model": model, "heads": heads, "left_out": dict(named.left_out())}))
        return
    for fit in found:
        print(f"{fit.head.head}  ({fit.head.method})\n    {fit.why}")
    if not found:
        print(f"no head is listed for {model}: the text itself drafts (--draft suffix); eyas accelerate trains a head")
    if model is None:
        print("\nNot in the list:")
        for heads_left_out, reason in named.left_out():
            print(f"{heads_left_out}\n    {reason}")


def _fitting(model: str) -> list[FittingHead]:
    """Return the heads that fit a model. A model with a name has heads of its own, which come first."""
    from eyas import named

    known = named.find(model)
    if known is None:
        return named.fitting_heads(model, _config(model))
    own = [
        named.FittingHead(
            named.ListedHead(model, str(path), kind, ""),
            "comes with the model, which takes it without --draft" + f" (--method {kind})" * (kind != known.best),
        )
        for kind, path in sorted(known.heads.items(), key=lambda head: head[0] != known.best)
    ]
    return own + (named.fitting_heads(known.published, {}) if known.published else [])


def _config(model: str) -> Fields:
    """Return the text config of a model; empty where it cannot be had: then its name alone decides which heads
    fit."""
    from transformers import AutoConfig

    try:
        with quiet():
            config = AutoConfig.from_pretrained(model)
    except (OSError, ValueError, KeyError):
        return {}
    return {**config.get_text_config(decoder=True).to_dict(), "_name_or_path": config.to_dict().get("_name_or_path")}
