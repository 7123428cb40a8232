"""The record of a training in the folder of its head: training.json for machines, README.md for
people. Knows no method.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eyas.files import write_text
from eyas.hardware import versions

__all__ = ["write_record"]


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Write training.json, with the command line and the versions of this run, and a model card. Raise InputError when
    it cannot be written.

    The model card reads these keys of `record`: method, target, head, trained_length, options,
    steps, step, best_step, tokens, seconds, processes, examples, heldout.
    """
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    whole = {**record, "command": command, "versions": versions()}
    write_text(folder / "training.json", json.dumps(whole, indent=2) + "\n")
    write_text(folder / "README.md", _card(whole))


def _card(record: Mapping[str, Any]) -> str:
    target, method = record["target"].get("name") or "the model it was trained on", record["method"]
    figures = "".join(f"| {name} | {value:.4f} |\n" for name, value in (record["heldout"] or {}).items())
    facts = "".join(f"| {name} | {value} |\n" for name, value in _facts(record).items())
    table = f"On {record['examples']['heldout']:,} held-out examples:\n\n| | |\n|---|---|\n{figures}"
    return f"""# {method} draft head for {target}

Drafts the next tokens of {target} (fingerprint `{record["target"]["fingerprint"]}`), which verifies several of them
in one forward pass. The generated text is that of the target alone; with another target the head only makes generation slow.

    eyas generate "..." --target {target if record["target"].get("name") else "TARGET"} --draft THIS_FOLDER --method {method}

| | |
|---|---|
{facts}
Trained by eyas {record["versions"]["eyas"]} for {record["step"]:,} of {record["steps"]:,} steps, {record["tokens"]:,} tokens of \
{record["examples"]["train"]:,} examples, in {record["seconds"] / 60:.1f} minutes; the weights are those of step {record["best_step"]:,}.
Everything about the run is in `training.json`, its losses in `log.jsonl`.

{table if figures else "Nothing was held out."}
"""


def _facts(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the properties of the head, as far as they are known."""
    head, options, facts = record["head"], record["options"], dict[str, str]()
    if "draft_vocab_size" in head:
        facts["tokens that it can draft"] = f"{head['draft_vocab_size']:,} of {head['vocab_size']:,}"
    facts["longest sequence that it was trained on"] = f"{record['trained_length']:,} tokens"
    facts["trained with"] = ", ".join(f"`{name}` {value}" for name, value in options.items()) or "no options"
    facts["processes"] = str(record["processes"])
    return facts
