"""The lines of a published file that say a setting, found by reading the file again with a line changed.

So no table of formats is here: a change counts if the format's own reader then returns the wanted head. For a file that
its reader refuses, `readings` yields the small changes with which the reader takes it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple

import torch

from eyas.checkpoints import Weights
from eyas.checkpoints.tools import DFLASH, DSPARK, IDS, SGLANG, Published, interpret
from eyas.errors import CheckpointError

__all__ = ["Edit", "edit_for", "readings"]

PLACES: tuple[tuple[str, ...], ...] = (
    (), ("eagle_config",), ("dflash_config",), ("rope_parameters",), ("transformer_layer_config",),
    ("transformer_layer_config", "rope_parameters"), ("eyas",),
)  # fmt: skip
"""Objects of a config.json that may hold a setting."""

UNSAID: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("sample_from_anchor", (True, False)),
    ("norm_before_residual", (True, False)),
    ("fc_norm", (True,)),
    ("norm_before_fc", (True,)),
    ("layer_ids", ("input", "output")),
    ("carries", ("raw", "normed")),
    ("architectures", ([SGLANG], ["Eagle3LlamaForCausalLM"], ["Qwen3Eagle3Model"], [DFLASH], [DSPARK])),
)
"""Settings without which readers refuse files, and their values."""

RECORDS = ("eyas", "layer_ids_as_published")  # keys of our config that change no number
ABSENT = object()


class Edit(NamedTuple):
    """A change of a published file."""

    says: str  # the lines as they are published
    write: str  # the lines to write instead
    published: Published  # the changed file


def edit_for(published: Published, source: str, wanted: Weights) -> Edit | None:
    """Return a change of config.json that makes the reader return the wanted head; None if no change does."""
    base = interpret(published, source).config
    changed = [key for key, value in wanted.config.items() if key not in RECORDS and value != base.get(key)]
    fields = [field for key in changed for field in _fields(key, wanted.config[key])]
    fields += [{"rope_is_neox_style": value} for value in (True, False)]
    edits = [edit for field in fields for place in PLACES if (edit := _edited(published, place, field))]
    edits.sort(key=lambda edit: edit.says.startswith("no "))  # a setting that the file says comes first
    return next((edit for edit in edits if _reads_as(edit.published, source, wanted)), None)


def readings(published: Published, source: str) -> Iterator[tuple[Edit, Weights]]:
    """Yield the changes with which a refused file can be read: of one part of it, or of two if one is not enough."""
    found = False
    for chosen in (*combinations(_guesses(published), 1), *combinations(_guesses(published), 2)):
        if found and len(chosen) > 1:
            return
        edits, now = list[Edit](), published
        for guess in chosen:
            if edit := guess(now):
                edits.append(edit)
                now = edit.published
        try:
            weights = interpret(now, source)
        except CheckpointError:
            continue
        found = True
        yield Edit("; ".join(edit.says for edit in edits), "; ".join(edit.write for edit in edits), now), weights


def _fields(key: str, value: Any) -> list[dict[str, Any]]:
    """Return the published fields that may say a setting of our config."""
    if key == "feature_layers":
        ids, outputs = list(value), [k - 1 for k in value]
        by_meaning: list[dict[str, Any]] = [
            {"layer_ids": "input"},
            {"layer_ids": "output"},
            {"feature_layers": ids, "layer_ids": "input"},
        ]
        names = {IDS: (ids, outputs), "target_layer_ids": (outputs,), "aux_hidden_state_layer_ids": (ids,)}
        return [*by_meaning, *({name: layers} for name, both in names.items() for layers in both)]
    if key == "causal":
        return [{"is_causal": any(value)}]
    others: dict[str, list[dict[str, Any]]] = {
        "carries": [{"norm_output": value == "normed"}],
        "from_anchor": [{"sample_from_anchor": value}, {"shift_label": value}],
        "mask_token": [{"mask_token_id": value}, {"pard_token": value}, {"pard_token": value, "mask_token_id": value}],
        "windows": [{"use_sliding_window": False}, {"layer_types": None}],
        "embed_scale": [{"input_embedding_scale": value}],
    }
    return [*others.get(key, []), {key: value}]


def _edited(published: Published, place: tuple[str, ...], field: Mapping[str, Any]) -> Edit | None:
    """Return the change that sets these names of an object; None if the file has these values, or no such object. "eyas"
    is made if there is none."""
    config, tensors = published
    inner = _value(config, place)
    if not isinstance(inner, Mapping) and place != ("eyas",):
        return None
    other = {name: value for name, value in field.items() if _value(config, (*place, name)) != value}
    if not other:
        return None
    said = {name: value for name in other if (value := _value(config, (*place, name))) is not ABSENT}
    says = _lines(place, said) if said else f"no {', '.join('.'.join((*place, name)) for name in other)}"
    changed = {**(inner if isinstance(inner, Mapping) else {}), **field}
    for depth in reversed(range(len(place))):
        changed = {**_value(config, place[:depth]), place[depth]: changed}
    return Edit(says, _lines(place, other), (changed, tensors))


def _value(config: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        config = config.get(name, ABSENT) if isinstance(config, Mapping) else ABSENT
    return config


def _lines(place: tuple[str, ...], values: Mapping[str, Any]) -> str:
    """Return these values of an object as config.json has them."""
    lines = json.dumps(values)[1:-1]
    for name in reversed(place):
        lines = f"{json.dumps(name)}: {{{lines}}}"
    return lines


def _reads_as(published: Published, source: str, wanted: Weights) -> bool:
    try:
        found = interpret(published, source)
    except CheckpointError:
        return False
    ours, theirs = ({k: v for k, v in w.config.items() if k not in RECORDS} for w in (found, wanted))
    if ours != theirs or found.tensors.keys() != wanted.tensors.keys():
        return False
    return all(torch.equal(tensor, wanted.tensors[name]) for name, tensor in found.tensors.items())


# --- files that are refused


def _guesses(published: Published) -> list[Callable[[Published], Edit | None]]:
    """Return changes that may make a refused file readable, each a function of the file."""
    fields = [{name: value} for name, values in UNSAID for value in values]
    tensors = published[1]
    fields += [{"draft_vocab_size": len(tensors[name])} for name in ("d2t", "lm_head.weight") if name in tensors][:1]
    return [
        *(partial(_edited, place=place, field=field) for field in fields for place in ((), ("eyas",))),
        _without_prefix,
        _with_offsets,
    ]


def _without_prefix(published: Published) -> Edit | None:
    """Take a word away with which all names of tensors begin."""
    config, tensors = published
    words = {name.partition(".")[0] for name in tensors}
    if len(words) != 1:
        return None
    renamed = {name.partition(".")[2]: tensor for name, tensor in tensors.items()}
    return Edit(f"names of tensors begin with {words.pop()}.", "the names without it", (config, renamed))


def _with_offsets(published: Published) -> Edit | None:
    """Make d2t again from the ids that t2d marks, or from its own values if they are ids."""
    config, tensors = published
    marks, ids = tensors.get("t2d"), tensors.get("d2t")
    ids = ids if marks is None else marks.nonzero().flatten()
    if ids is None:
        return None
    says = "another d2t" if "d2t" in tensors else "no d2t"
    write = "d2t: the id of each draft token, minus the token's index"
    return Edit(says, write, (config, {**tensors, "d2t": ids - torch.arange(len(ids))}))
