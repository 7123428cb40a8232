"""MTP modules that eyas trained, exported: stitched into a copy of their target's checkpoint, from where
engines load them.

    config.json                     the target's, and the number of modules where it has none
    the target's files              linked, or copied where that is not possible
    mtp.safetensors                 the module, in place of one that the target has
    model.safetensors.index.json    says which file holds which tensor

The names are the family's own: `mtp.fc`, `mtp.pre_fc_norm_embedding`, `mtp.pre_fc_norm_hidden`,
`mtp.norm`, `mtp.layers.0.*` (Qwen3-Next, Qwen3.5). DeepSeek-V3 and GLM-4 MoE have them after the L layers of
the target, as `model.layers.L.*` with `eh_proj`, `enorm`, `hnorm` and `shared_head.norm`. Experts are written
one by one. A family without such names is refused: no engine has a class for it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from eyas.checkpoints import ExportTarget
from eyas.checkpoints.tools import Published, hub_refusal, read_config
from eyas.errors import CheckpointError

NAME, EXPORTS, EXPORT_FILE = "checkpoint", ("mtp",), "mtp.safetensors"
QWEN = {
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "eh_proj": "mtp.fc",
    "post_norm": "mtp.norm",
}
QWEN_TYPES = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
NUMBERED_TYPES = ("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite")
INDEX = "model.safetensors.index.json"
MODEL_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.py", "*.tiktoken", "*.txt"]  # of a hub's repository
# The target's files that have another name in the copy: transformers takes a model.safetensors for the whole model, and
# the other name is the module's.
RENAMED = {"model.safetensors": "model-00001-of-00001.safetensors", EXPORT_FILE: "model-mtp.safetensors"}


def export(method: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: ExportTarget) -> Published:
    """Return the target's config.json, and the module's tensors under the family's names."""
    kind = config["target_model_type"]
    if kind not in (*QWEN_TYPES, *NUMBERED_TYPES):
        raise CheckpointError(f"checkpoints of a {kind} have no names for such a module, and engines no class for it")
    if any(name.startswith("shared_norm.") for name in tensors):
        raise CheckpointError("the module shares its last norm with others, which such checkpoints do not say")
    theirs = read_config(_folder(target))
    text = dict(theirs["text_config"]) if isinstance(theirs.get("text_config"), dict) else theirs
    if (text.get("hidden_size"), text.get("vocab_size")) != (config["hidden_size"], config["vocab_size"]):
        raise CheckpointError(f"{target.name} has another hidden size or vocabulary than the module's target")
    key = "mtp_num_hidden_layers" if kind in QWEN_TYPES else "num_nextn_predict_layers"
    changed = {**text, key: 1}
    published = {**theirs, "text_config": changed} if text is not theirs else changed
    prefix = "mtp.layers.0" if kind in QWEN_TYPES else f"model.layers.{text['num_hidden_layers']}"
    outer = QWEN if kind in QWEN_TYPES else _numbered(prefix)
    renamed = dict[str, Tensor]()
    for name, tensor in tensors.items():
        part, _, rest = name.removeprefix("module.").partition(".")
        if part == "mtp_block":
            renamed |= _by_expert(f"{prefix}.{rest}", tensor)
        else:
            renamed[f"{outer[part]}.{rest}"] = tensor
    return published, renamed


def finish(folder: Path, target: ExportTarget) -> None:
    """Put the target's files into the module's folder, with an index of all tensors."""
    source, weight_map, size = _folder(target), dict[str, str](), 0
    ours = set(_tensors(folder / EXPORT_FILE))
    for file in sorted(source.iterdir()):
        if file.name in ("config.json", INDEX) or file.name.startswith(".") or not file.is_file():
            continue
        if file.suffix == ".safetensors" and ours.issuperset(_tensors(file)):
            continue  # a module that was stitched in before
        name = RENAMED.get(file.name, file.name)
        _link(file, folder / name)
        if file.suffix == ".safetensors":
            weight_map |= dict.fromkeys(_tensors(file), name)
            size += file.stat().st_size
    if not weight_map:
        raise CheckpointError(f"{source} has no weights in safetensors, into which a module could be stitched")
    weight_map |= dict.fromkeys(ours, EXPORT_FILE)
    index = {"metadata": {"total_size": size + (folder / EXPORT_FILE).stat().st_size}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def usage(method: str, config: Mapping[str, Any], folder: str, target: str) -> list[str]:
    """Return lines, of a shell or of Python, by which engines run the module."""
    speculative = '{"method": "mtp", "num_speculative_tokens": 2}'
    return [
        f"vllm serve {folder} --speculative-config '{speculative}'",
        f"python -m sglang.launch_server --model-path {folder} --speculative-algorithm NEXTN",
        f"eyas generate --target {folder} --method mtp",
    ]


def _folder(target: ExportTarget) -> Path:
    """Return the target's folder, fetched from the hub if it is not here."""
    if not target.name:
        raise CheckpointError(
            "a module is stitched into a copy of its target: pass the target's folder or hub id with --target"
        )
    folder = Path(target.name).expanduser()
    if folder.is_dir():
        return folder
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(target.name, allow_patterns=MODEL_FILES))
    except Exception as error:  # the hub's client raises errors of several libraries
        raise CheckpointError(
            f"target {target.name}: this folder does not exist, and {hub_refusal(error, None)}"
        ) from error


def _numbered(prefix: str) -> dict[str, str]:
    return {
        **{part: f"{prefix}.{part}" for part in ("enorm", "hnorm", "eh_proj")},
        "post_norm": f"{prefix}.shared_head.norm",
    }


def _by_expert(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return a tensor of all experts split into one for each, as checkpoints hold them; any other tensor unchanged."""
    stem, _, kind = name.rpartition(".")
    if kind == "gate_up_proj":
        halves = zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True)
        return {f"{stem}.{e}.{part}_proj.weight": half[e] for part, half in halves for e in range(len(tensor))}
    if kind == "down_proj":
        return {f"{stem}.{e}.down_proj.weight": tensor[e] for e in range(len(tensor))}
    return {name: tensor}


def _tensors(file: Path) -> Iterator[str]:
    with safe_open(file, framework="pt") as opened:
        yield from opened.keys()


def _link(source: Path, place: Path) -> None:
    try:
        os.link(source.resolve(), place)
    except OSError:  # another file system
        shutil.copyfile(source, place)
