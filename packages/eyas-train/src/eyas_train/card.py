"""The model card of a draft head: its use, its quality and the commands of each engine, from the record of its
training. It is the README.md in the folder of a trained head, and on the hub."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eyas.checkpoints import Weights

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def model_card(weights: Weights, record: Mapping[str, Any], place: str, target: str, license: str = "") -> str:
    """Return the README.md of a head.

    Args:
        record: the head's training.json; empty when there is none.
        place: the head's folder, or the hub id that it gets.
        target: the target's folder or hub id; empty when unknown.
        license: as the hub names it; empty for a head that is not sent there.
    """
    metadata = {
        "license": license,
        "base_model": target if HUB_ID.fullmatch(target) else None,
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", weights.method, "eyas", "custom_generate"],
    }
    front = "\n".join(f"{key}: {json.dumps(value)}" for key, value in metadata.items() if value)
    recorded = record.get("target", {})
    name = target or recorded.get("name") or "the model that it was trained on"
    fingerprint = (weights.config.get("eyas") or {}).get("target_fingerprint") or recorded.get("fingerprint")
    identity = f"{name} (fingerprint `{fingerprint}`)" if fingerprint else name
    parts = [
        f"---\n{front}\n---" if license else "",
        f"# {weights.method} draft head for {name}",
        f"Drafts the next tokens of {identity}, which verifies several of them in one forward pass. The text is that of the target\n"
        "alone: a head makes generation faster and changes nothing. With another target it only makes generation slower.",
        _figures(record),
        _training(record),
        _uses(weights.method, place, target or "TARGET", bool(license)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _figures(record: Mapping[str, Any]) -> str:
    """Return the figures of the held-out examples."""
    figures = record.get("heldout") or {}
    if not figures:
        return "## Figures\n\nNothing was held out when this head was trained, or it came without a record."
    rows = "\n".join(f"| {name} | {value:.4f} |" for name, value in figures.items())
    count = record.get("examples", {}).get("heldout")
    return (
        f"## Figures\n\nOn {count:,} held-out examples of the training data, greedy:\n\n| | |\n|---|---|\n{rows}\n\n"
        "`tau` is the mean number of tokens per forward of the target, with a tree; `chain tau` with a chain; `n-alpha` the share of\n"
        "drafted tokens that are accepted after n drafted ones."
    )


def _training(record: Mapping[str, Any]) -> str:
    """Return the data and settings, as far as the record has them."""
    if not record:
        return ""
    data, head = record.get("data", {}), record.get("head", {})
    drafted = head.get("draft_vocab_size")
    facts = {
        "data": data.get("report"),
        "SHA-256 of the data": data.get("sha256"),
        "training examples": record.get("examples", {}).get("train"),
        "steps": record.get("best_step"),
        "tokens": record.get("tokens"),
        "longest sequence": record.get("trained_length"),
        "tokens that it can draft": drafted and f"{drafted:,} of {head['vocab_size']:,}",
        "options": ", ".join(f"`{name}` {value}" for name, value in record.get("options", {}).items()),
        "precision": record.get("precision"),
        "processes": record.get("processes"),
        "versions": ", ".join(f"{name} {version}" for name, version in record.get("versions", {}).items()),
    }
    shown = {name: f"{value:,}" if isinstance(value, int) else value for name, value in facts.items() if value}
    rows = "\n".join(f"| {name} | {value} |" for name, value in shown.items())
    return f"## Training\n\n| | |\n|---|---|\n{rows}\n\nEverything else is in `training.json`."


def _uses(method: str, place: str, target: str, on_hub: bool) -> str:
    """Return the commands that run the head in each engine."""
    from eyas_train import exports

    asked = f"--target {target} --draft {place}"
    lines = ["## Use", f'eyas:\n\n```\neyas generate {asked} "..."\neyas serve {asked}\n```']
    if on_hub:
        call = f'model.generate(**inputs, custom_generate="{place}", trust_remote_code=True)'
        lines.append(
            f"transformers (with eyas installed):\n\n```python\n{call}  # runs custom_generate/generate.py\n```"
        )
    for name, methods in exports.export_formats().items():
        if method in methods:
            ending = exports.suffix(method, name)
            folder, model = (f"HEAD{ending}", f"TARGET{ending}") if ending else ("FOLDER", target)
            export = f"eyas export {place} --format {name} --target {model} --output {folder}"
            commands = "\n".join([export, *exports.usage(method, name, folder, model)])
            lines.append(f"As {name}:\n\n```\n{commands}\n```")
    return "\n\n".join([*lines, "`eyas export` refuses a head that the engine would compute in another way."])
