"""Fetches the folder of a draft head from the hub, and says why it cannot."""

from __future__ import annotations

from pathlib import Path

from eyas.errors import CheckpointError, first_line

__all__ = ["fetch", "hub_refusal"]

_SAFE_FILES = ["config.json", "*.safetensors", "*.safetensors.index.json"]
_PICKLED_FILES = ["*.bin", "*.bin.index.json", "*_lm_head.pt"]


def fetch(hub_id: str, revision: str | None) -> Path:
    """Return the folder of a hub snapshot: config and safetensors, or pickled files where there are
    no safetensors."""
    import huggingface_hub

    try:
        folder = Path(huggingface_hub.snapshot_download(hub_id, revision=revision, allow_patterns=_SAFE_FILES))
        if not any(folder.glob("*.safetensors")):
            folder = Path(huggingface_hub.snapshot_download(hub_id, revision=revision, allow_patterns=_PICKLED_FILES))
    except Exception as error:  # the hub's client raises errors of several libraries
        raise CheckpointError(
            f"draft head {hub_id}: this folder does not exist, and {hub_refusal(error, revision)}"
        ) from error
    return folder


def hub_refusal(error: Exception, revision: str | None) -> str:
    """Return the reason why the hub did not deliver; for common ones it says what to do."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return "the hub gives it only to those who asked for access: ask there, then log in"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "the hub has no such repository, or keeps it private: check the name, or log in"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the hub has no revision {revision!r} of it"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return "the hub cannot be reached, and no copy was fetched earlier: connect, or give a folder"
    return f"fetching it from the hub failed ({type(error).__name__}: {first_line(error, 200)})"
