"""`eyas push`: a draft head with its model card to the hub."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from eyas.cli.tools import AS_JSON, note, option_group
from eyas.errors import EyasError, InputError, first_line
from eyas_train.card import HUB_ID, model_card
from eyas_train.commands._data import recorded_target, training_record

if TYPE_CHECKING:
    from eyas.checkpoints import Weights

GROUP = "Heads"
SENT = ("config.json", "training.json", "log.jsonl", "*.safetensors", "*.bin", "*.index.json", "*_lm_head.pt")
EXAMPLES = """
eyas push HEAD me/my-head  # shows the files and the model card, and sends nothing
eyas push HEAD me/my-head --yes --license apache-2.0  # sends them
eyas generate --target MODEL --draft me/my-head "Why ..."  # then generate with the head, anywhere
"""
NOTES = (
    "Sent are config.json, the weights, training.json, log.jsonl, custom_generate/ and a new README.md; nothing else in the folder.",
    "The hub's own settings hold: HF_TOKEN or `hf auth login` for access, HF_ENDPOINT for another hub.",
)


@option_group
class PushOptions:
    """Options of the upload and its model card."""

    yes: Annotated[bool, "Output"] = False
    """Send the files. Otherwise they are only shown."""
    private: Annotated[bool, "Output"] = False
    """Make a private repository, if there is none yet."""
    license: Annotated[str, "Output", "NAME"] = "other"
    """The licence on the card, as the hub names it: apache-2.0, mit, ... Mind the licences of
    the target and of the data."""
    target: Annotated[str | None, "Model", "PATH|HUB"] = None
    """The target's name for the card. Default: the one in the head's record."""
    as_json: AS_JSON = False


def command(
    head: Annotated[str, "Model", Parameter(help="The folder of the draft head.")],
    repo: Annotated[
        str, "Output", Parameter(help="Its hub id, OWNER/NAME; a repository that is not there yet is made.")
    ],
    /,
    *,
    job: PushOptions,
) -> None:
    """Send a draft head with a model card to the hub, or only show the files and the card."""
    from eyas import checkpoints

    folder = Path(head).expanduser()
    if not folder.is_dir():
        raise InputError(f"folder {head} does not exist: pass the folder of a draft head")
    if not HUB_ID.fullmatch(repo):
        raise InputError(f"{repo!r} is not a hub id: give OWNER/NAME")
    weights = checkpoints.load(folder)
    with tempfile.TemporaryDirectory() as place:
        parcel = Path(place)
        card = _fill(parcel, folder, weights, repo, job)
        paths = [path for path in sorted(parcel.rglob("*")) if path.is_file()]
        files = {path.relative_to(parcel).as_posix(): path.stat().st_size for path in paths}
        if not job.as_json:
            _show(files, card, repo, job.yes)
        url = _send(parcel, repo, job.private, weights.method) if job.yes else None
    if job.as_json:
        print(json.dumps({"repo": repo, "files": files, "sent": job.yes, "url": url, "card": card}))
    elif url:
        note(f"sent: {url}")


def _fill(parcel: Path, folder: Path, weights: Weights, repo: str, job: PushOptions) -> str:
    """Put the files to send into a folder; return the card."""
    from eyas_train.custom_generate import write_custom_generate

    for pattern in SENT:
        for path in folder.glob(pattern):
            shutil.copy(path, parcel / path.name)
    write_custom_generate(parcel)
    record = training_record(folder)
    target = recorded_target(record) if job.target is None else job.target
    card = model_card(weights, record, repo, target, job.license)
    (parcel / "README.md").write_text(card, encoding="utf-8")
    return card


def _show(files: dict[str, int], card: str, repo: str, sending: bool) -> None:
    width = max(map(len, files))
    for name, size in files.items():
        print(f"{name:{width}}  {size:>13,} bytes")
    print(f"\n{card}")
    if not sending:
        note(f"nothing was sent; with --yes these {len(files)} files go to {repo}")


def _send(parcel: Path, repo: str, private: bool, method: str) -> str:
    """Make the repository if need be, and send the folder as one commit; returns its address."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        sent = api.upload_folder(repo_id=repo, folder_path=parcel, commit_message=f"{method} draft head by eyas")
    except Exception as error:  # the hub's client raises errors of several libraries
        reason = f"{type(error).__name__}: {first_line(error, 200)}"
        raise EyasError(f"the hub did not take {repo} ({reason})") from error
    return str(sent.commit_url)
