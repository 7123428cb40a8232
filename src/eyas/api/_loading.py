"""Loads a target and its tokenizer, with a drafter."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eyas import checkpoints, drafters
from eyas.api._llm import LLM, new_policy
from eyas.arguments import Keywords, load_keywords, mode_of, on_or_off, placement_of
from eyas.core.drafter import Drafter
from eyas.core.options import build_options, option_defaults
from eyas.core.sockets import RUNNER, TARGET, KnownTarget, PlainRunner, Source
from eyas.core.target import Target
from eyas.drafters import DraftMethod
from eyas.errors import CheckpointError, ModelError, OptionError, UnknownOptionError, near
from eyas.targets.loading import load_target, pick_device, pick_dtype, target_of
from eyas.targets.pretrained import DeviceMap, check_config, is_peft_model, read_tokenizer
from eyas.threads import plain_defaults, release_threads

DEFAULT_METHODS = {"eagle1": "eagle2"}  # method for a head format, if it is not the format's own
AUTO = "auto"  # the draft that the list of published heads has for the target
WITHOUT_HEAD = "suffix"  # the default method without a head


def load(
    target: str | Path | PreTrainedModel | None = None,
    draft: str | Path | Drafter | None = None,
    method: str | None = None,
    *,
    draft_with: str | None = None,
    adapter: str | Path | Sequence[str | Path] | Mapping[str, str | Path] | None = None,
    gguf_file: str | None = None,
    cache: bool = True,
    tokenizer: str | Path | PreTrainedTokenizerBase | Literal[False] | None = None,
    dtype: str | torch.dtype | None = "auto",
    device: str | torch.device | int | None = "auto",
    device_map: str | torch.device | int | Mapping[str, str | int] | None = None,
    offload_folder: str | Path | None = None,
    trust_remote_code: bool = False,
    kernels: str | bool | None = "auto",
    weights: str = "exact",
    activations: str = "exact",
    kv: str = "exact",
    draft_weights: str = "auto",
    **options: Any,
) -> LLM:
    """Load a target with a drafter, ready to generate.

    Args:
        target: a local folder, a hub id, a file in GGUF format, or a loaded model, which is used as it is; quantised
            models stay quantised (docs/guide/models.md). "smollm2" is SmolLM2-135M-Instruct, which is fetched when it is
            first asked for. None is the embedded model with its own head. Its own forward follows new weights and
            hooks; kernels raise ModelError after them. Changes through `parameter.data` are not noticed: load again.
        draft: the local folder or hub id of a draft head, or a Drafter, or the name of a method that needs no head.
            "auto" takes the first head that is listed for this target and can be read (docs/reference/head_formats.md), and a
            warning says which.
        method: a name that `eyas methods` lists, or a dotted path. None is the method that the head was made for
            (eagle2 for an EAGLE-1 head); without a head it is `suffix`, and for the embedded model `mtp`.
        draft_with: a second method, which must need no head. In every cycle its tree is merged with the first one's.
        adapter: the local folder or hub id of a PEFT adapter for the target (LoRA, DoRA and the like). It is merged
            into the weights, unless these are quantised. A dict from names to folders loads several; requests choose
            one by `generate(..., adapter=name)`. A PeftModel as the target is used with all of its adapters. Adapters
            need the extra `peft`.
        gguf_file: the name of a file in GGUF format in the target's folder or on the hub. Its quantised
            weights are converted to plain ones. Needs the extra `quantised`.
        cache: whether the converted GGUF file is kept on this machine and used again (docs/guide/models.md).
        tokenizer: a local folder, a hub id or a tokenizer, where it is not the target's own. False loads none.
        dtype: "auto" is float32 on a CPU, and the checkpoint's own dtype on an accelerator or for quantised weights.
        device: "auto" is CUDA if available, else the CPU.
        device_map: where accelerate puts the weights, as `from_pretrained` of transformers takes it: "auto",
            "balanced", or a device, "cpu" or "disk" for each part of the model. Layers may be on several devices;
            weights that wait in memory or on disk are fetched for each forward. Needs the extra `offload`.
        offload_folder: the folder of the weights that the map puts on "disk", if the checkpoint is not safetensors.
        trust_remote_code: whether Python code that comes with the target may run.
        kernels: "auto" uses compiled kernels on a CPU for the model types that they support. On a GPU it uses
            CUDA graphs once they have given the model's own numbers there. Elsewhere it is the model's own
            forward. "on" does the same for a model that you loaded, too, and warns where kernels are not used.
            "fixed" is "on" with kernels whose sums have one order, so that ids equal plain decoding's in every
            dtype; it is an error where there are none. "compile" is "on" with torch.compile for layers that
            have no kernels (on a GPU). "off" uses the model's own forward.
        weights: "exact", or "bfloat16", "int8" or "int4", to which the kernels round the target's weights. That is
            faster, and the output is then the rounded model's, not the original's.
        activations: "exact", or the format to which the kernels round the inputs of linear layers: "bfloat16" with
            weights in bfloat16, "int16" or "int8" with weights in int8 or int4. Prompts and large trees then cost
            less; the output is again the rounded model's.
        kv: "exact", or "bfloat16" or "int8", to which the kernels round keys and values: a half or a quarter of their
            memory. Long contexts cost less, and the output is again another model's.
        draft_weights: the format of the head's weights. "auto" is as stored, except that the CPU kernels round to
            int8 with 16-bit activations; "int4" is rounded by the CPU kernels, "fp8" for GPUs with fp8 matrix
            products. This changes guesses only, no text. "exact" is read as "auto".
        options: the method's own options, for example tree={"nodes": 32, "depth": 5}. Options that only the
            second method has go there. By default, unless a tree is described, tree="auto" adapts the tree's
            size to this machine and drafts nothing where that is faster. With tree="fixed" it keeps to the
            options in every cycle.

    Raises:
        ModelError, CheckpointError, OptionError: one line that names the mistake and the remedy.
    """
    device, spread = placement_of(target, device, device_map, offload_folder)
    options, dtype, device = load_keywords(options, dtype, device)
    if method is None and isinstance(draft, str) and draft in drafters.names() and not Path(draft).exists():
        draft, method = None, draft
    mode, options = ("fixed", options) if isinstance(draft, Drafter) and "tree" not in options else mode_of(options)
    plain = spread is None and not adapter and dtype in ("auto", "float32") and not trust_remote_code
    stored = plain and pick_device(device) == "cpu" and on_or_off(kernels) != "off"
    found = (plug.find_target(target, gguf_file, cache, stored) for plug in TARGET.plugs)
    known = next((one for one in found if one is not None), None)  # None: a folder, a hub id or a loaded model
    if known is not None and known.best is not None and draft in (None, AUTO):
        method = method or known.best
        draft = known.heads.get(drafters.find(method).head_format)
    settings = TargetSettings(tokenizer, dtype, device, trust_remote_code, _adapters(adapter), spread, gguf_file)
    with plain_defaults():
        loaded_target, loaded_tokenizer = read_target(target, known, settings)
        runner, own = RUNNER.plug or PlainRunner(), isinstance(target, str | Path | None)
        loaded_target = runner.with_fastest_runner(
            loaded_target, on_or_off(kernels), own, weights, activations, kv, draft_weights
        )
        if isinstance(draft, str) and draft == AUTO:
            draft, drafter = _listed_drafter(loaded_target, method, options, draft_with)
        else:
            drafter = _load_drafter(loaded_target, draft, method, options, draft_with)
        runner.warm_up(drafter)
        release_threads()
        policy = new_policy(drafter) if mode == "auto" else None
        return LLM(
            loaded_target, drafter, loaded_tokenizer, str(draft) if isinstance(draft, str | Path) else None, policy
        )


def _load_drafter(target: Target, draft: Any, method: str | None, options: Keywords, draft_with: str | None) -> Drafter:
    """Return the drafter that `load` asks for; with `draft_with` two, merged."""
    second = None if draft_with is None else drafters.find(draft_with)
    if second is not None and second.needs_weights:
        raise OptionError(
            f"draft_with takes a method that needs no head, but {draft_with} needs one: pass it as the method"
        )
    if isinstance(draft, Drafter):
        _check_ready_drafter(draft, target, method, options if second is None else {})
        return draft if second is None else drafters.merge(draft, _build(second, None, target, options))
    if not isinstance(draft, str | Path | None):
        raise OptionError(f"a draft is a folder, a hub id or a Drafter, not {type(draft).__name__}")
    if method is None:
        format_method = WITHOUT_HEAD if draft is None else checkpoints.load(draft).method
        method = DEFAULT_METHODS.get(format_method, format_method)
    first = drafters.find(method)
    second_options = {
        name: value for name, value in options.items() if second and _has(second, name) and not _has(first, name)
    }
    drafter = _build(
        first, draft, target, {name: value for name, value in options.items() if name not in second_options}
    )
    _warn_about_head(drafter, draft, target)
    return drafter if second is None else drafters.merge(drafter, _build(second, None, target, second_options))


def _listed_drafter(
    target: Target, method: str | None, options: Keywords, draft_with: str | None
) -> tuple[str | None, Drafter]:
    """Return (hub id, drafter) of the first listed head that can be read, else the default without a head."""
    reads = None if method is None else drafters.find(method).head_format
    known = (head for plug in TARGET.plugs for head in plug.heads_for(target))
    heads = [head for head in known if head.listed and reads in (None, head.method)]
    failures = list[CheckpointError]()
    for head in heads:
        try:
            drafter = _load_drafter(target, head.head, method, options, draft_with)
        except CheckpointError as error:
            failures.append(error)
            continue
        warnings.warn(f"draft auto: took {head.head}, which {head.listed}", stacklevel=3)
        return head.head, drafter
    if failures and not all(head.of_family for head in heads):
        rest = f" (and {len(failures) - 1} more listed heads fail)" if len(failures) > 1 else ""
        raise CheckpointError(f"draft auto: {failures[0]}{rest}") from failures[0]
    why = f"no head is listed for {target.name}" + "".join(f", and {failure}" for failure in failures)
    warnings.warn(f"draft auto: {why}; took {method or WITHOUT_HEAD}, which needs none", stacklevel=3)
    return None, _load_drafter(target, None, method, options, draft_with)


def _build(kind: type[DraftMethod], source: str | Path | None, target: Target, options: Keywords) -> Drafter:
    for name in options:
        if not _has(kind, name):
            known = [*option_defaults(kind.Options), *LOAD_KEYWORDS]
            raise UnknownOptionError(name, near(name, known))
    return kind.from_pretrained(source, target, build_options(kind.Options, options))


def _has(kind: type[DraftMethod], option: str) -> bool:
    return option.partition(".")[0] in {f.name for f in fields(kind.Options)}


def _check_ready_drafter(draft: Drafter, target: Target, method: str | None, options: Keywords) -> None:
    if method is not None or options or draft.target.model is not target.model:
        raise OptionError(
            "a Drafter brings its own method, options and target: give it alone, on the target that it was made for"
        )
    if draft.target.draft_weights != target.draft_weights:
        raise OptionError("the precision of a Drafter's weights was chosen when it was made: leave draft_weights out")


def _adapters(given: Any) -> dict[str, str] | str | None:
    if given is None:
        return None
    from eyas.targets.adapters import adapters_of

    return adapters_of(given)


def _warn_about_head(drafter: Drafter, draft: str | Path | None, target: Target) -> None:
    method = drafter.parts[0] if drafter.parts else drafter  # the head belongs to the first of two methods
    if not isinstance(method, DraftMethod):
        return
    from eyas.targets.fingerprints import doubts

    for doubt in doubts(method, str(draft), target):
        warnings.warn(doubt, stacklevel=4)


LOAD_KEYWORDS = tuple(name for name in load.__annotations__ if name not in ("options", "return"))


Loaded = tuple[Target, PreTrainedTokenizerBase | None]


class TargetSettings(NamedTuple):
    """The arguments of `load` that decide how a target is read."""

    tokenizer: Any
    dtype: str
    device: str
    trust_remote_code: bool
    adapters: dict[str, str] | str | None
    device_map: DeviceMap | None
    gguf_file: str | None


def read_target(target: Any, known: KnownTarget | None, settings: TargetSettings) -> Loaded:
    """Return a target and its tokenizer. Raise ModelError or OptionError if it cannot be read as the settings ask."""
    if settings.gguf_file is not None and (known is None or not known.takes_file):
        raise OptionError(
            "gguf_file names a file of a target that eyas loads: give the target's folder or hub id with it"
        )
    if known is not None:
        with known.open(settings.tokenizer) as source:
            return _read(source, settings)
    if isinstance(target, PreTrainedModel) or is_peft_model(target):
        return _take(target, settings)
    if target is None:
        raise ModelError("there is no embedded model in this installation of eyas: pass a target")
    if not isinstance(target, str | Path):
        raise ModelError(
            f"a target is a folder, a hub id or a causal language model of transformers, not {type(target).__name__}"
        )
    return _read(Source(target, "", settings.tokenizer), settings)


def _read(source: Source, settings: TargetSettings) -> Loaded:
    """Read a folder or a hub repository, or finish a model that a plug has made."""
    place, trust = source.place, settings.trust_remote_code
    if isinstance(place, PreTrainedModel):
        device = torch.device(pick_device(settings.device))
        dtype = pick_dtype(settings.dtype, device)
        model: torch.nn.Module = place
        model.to(device=device, dtype=torch.float32 if isinstance(dtype, str) else dtype)
        return target_of(model, source.name, settings.adapters), _tokenizer(source.tokenizer, "")
    check_config(place, trust)
    tokenizer = _tokenizer(source.tokenizer, place, trust)
    target = load_target(
        place,
        settings.dtype,
        settings.device,
        trust,
        adapters=settings.adapters,
        device_map=settings.device_map,
        name=source.name,
    )
    return target, tokenizer


def _take(model: Any, settings: TargetSettings) -> Loaded:
    if settings.adapters:
        raise OptionError(
            "put the adapter into a model that you loaded by PeftModel.from_pretrained, and give eyas.load the result"
        )
    name = (model.get_base_model() if is_peft_model(model) else model).name_or_path
    tokenizer = _tokenizer(settings.tokenizer, name)
    return target_of(model, name or type(model).__name__), tokenizer


def _tokenizer(given: Any, place: str | Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer that the caller names, else the one at `place`; None for False."""
    if given is None:
        return read_tokenizer(place, trust_remote_code) if place else None
    if given is False:
        return None
    if isinstance(given, PreTrainedTokenizerBase):
        return given
    if not isinstance(given, str | Path):
        raise ModelError(
            f"a tokenizer is a folder, a hub id or a tokenizer of transformers, not {type(given).__name__}"
        )
    return read_tokenizer(given, trust_remote_code, required=True)
