"""`eyas export`: a draft head in the form that another engine reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from eyas.cli.tools import AS_JSON, option_group, quiet
from eyas.errors import InputError, first_line
from eyas_train.commands._data import recorded_target, training_record

if TYPE_CHECKING:
    from torch import Tensor

    from eyas.checkpoints import ExportTarget

GROUP = "Heads"
EXAMPLES = """
eyas export HEAD --format vllm --output FOLDER  # EAGLE-1, EAGLE-2, EAGLE-3
eyas export HEAD --format sglang --output FOLDER  # without explicit layers, vLLM and llama.cpp read it too
eyas export HEAD --format speculators --target MODEL --output FOLDER  # names its target
eyas export HEAD --format gguf --target TARGET.gguf --output HEAD.gguf  # llama.cpp; EAGLE-3, DFlash, DFlash 2, DSpark
eyas generate --target MODEL --draft FOLDER "Why ..."  # eyas reads each export, too
"""
NOTES = (
    "EAGLE heads: vllm, sglang and safeailab take EAGLE-1, EAGLE-2 and EAGLE-3; speculators, openvino and gguf take EAGLE-3.",
    "Block heads: vllm, sglang, speculators and gguf take DFlash, DFlash 2 and DSpark; openvino takes DFlash.",
    "Others: medusa, hydra, as their authors write them. An MTP module goes into a copy of its target: checkpoint, gguf.",
    "If an engine would compute a head in another way, eyas refuses and says why: see docs/reference/export.md.",
)


@option_group
class ExportOptions:
    """The format and the place of the export."""

    format: Annotated[str, "Output", "NAME"]
    """Engine or library that will read the head."""
    output: Annotated[str, "Output", "FOLDER|FILE"]
    """A new folder; for gguf a new file."""
    dtype: Annotated[Literal["f32", "f16", "bf16", "q8_0"] | None, "Output"] = None
    """The type in which a GGUF file stores matrices. Default: the head's own."""
    target: Annotated[str | None, "Model", "PATH|HUB"] = None
    """The target model. Some formats hold its name, and some need its embeddings. For gguf give the target's
    own GGUF file, whose vocabulary the head needs. Default: the name in the head's record."""
    generate_hook: Annotated[bool, "Output"] = False
    """Also write custom_generate/, with which transformers' generate uses this head
    (docs/guide/transformers.md)."""
    trust_remote_code: Annotated[bool, "Model"] = False
    """Run Python code that comes with the target."""
    as_json: AS_JSON = False


def command(
    head: Annotated[str, "Model", Parameter(help="The draft head: a folder or a hub id.")], /, *, job: ExportOptions
) -> None:
    """Write a draft head in the form that another engine reads."""
    from eyas import checkpoints
    from eyas_train import exports

    weights = checkpoints.load(head)
    if job.generate_hook and exports.suffix(weights.method, job.format):
        raise InputError(f"--generate-hook writes into a folder, but {job.format} is a single file: leave it out")
    lines = exports.export(weights, job.format, job.output, _target(head, job), job.dtype or "")
    if job.generate_hook:
        from eyas_train.custom_generate import write_custom_generate

        write_custom_generate(job.output)
    if job.as_json:
        export = {"head": weights.source, "method": weights.method, "format": job.format, "output": job.output}
        print(json.dumps({**export, "usage": lines}))
        return
    print(f"{job.output} holds the {weights.method} head in the form of {job.format}:")
    for line in lines:
        print(f"    {line}")


def _target(head: str, job: ExportOptions) -> ExportTarget:
    """Return the target, as the options and the head's record describe it."""
    from eyas import named
    from eyas.checkpoints import ExportTarget

    if job.target is None:
        return ExportTarget(recorded_target(training_record(Path(head).expanduser())))

    def embedding() -> Tensor:
        import torch

        from eyas.api import load

        with quiet():
            target = load(job.target, method="vanilla", kernels="off", trust_remote_code=job.trust_remote_code).target
        return target.embed(torch.arange(target.vocab_size, device=target.device)).float().cpu()

    model, place = named.find(job.target), named.place_of(job.target)
    name = job.target if model is None else model.published
    return ExportTarget(name, _architectures(place) if place else ("LlamaForCausalLM",), embedding)


def _architectures(target: str) -> tuple[str, ...]:
    """Return the architectures in a target's config.json; none for a file in GGUF format. Raise InputError when it
    cannot be read."""
    from transformers import PretrainedConfig

    if target.endswith(".gguf"):
        return ()
    try:
        with quiet():
            config, _ = PretrainedConfig.get_config_dict(target)
    except (OSError, ValueError) as error:
        raise InputError(f"target {target}: its config.json cannot be read ({first_line(error, 200)})") from error
    if not config:
        raise InputError(f"target {target} has no config.json: pass a folder in Hugging Face layout, or a hub id")
    return tuple(map(str, config.get("architectures") or ()))
