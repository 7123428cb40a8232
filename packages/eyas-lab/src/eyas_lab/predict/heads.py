"""Weights that a draft reads, from the head's config.json, and how often its tokens are accepted.

An EAGLE head or an MTP module runs once for each level of the tree: one layer of LLaMA's shape, a matrix that
joins its inputs, and an output matrix. A small model runs as a whole. Where the text drafts, nothing is read.

Acceptance by depth comes from the head's training (training.json), or is typical of its method.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.errors import CheckpointError, InputError, OptionError, first_line, near
from eyas.files import parse_json
from eyas_lab.predict.models import Model, read_model

__all__ = ["METHODS", "TYPICAL", "Acceptance", "Head", "check_method", "read_head"]

DRAFT_VOCAB = 32_000  # of an EAGLE-3 head that is not there yet, as published heads have


@dataclass(frozen=True)
class Acceptance:
    """How often the first child of a node is accepted, and how well that is known."""

    by_depth: tuple[float, ...]  # given that all before it were; the last one holds for all deeper levels
    deviation: float  # of all of them together, from text to text and head to head
    source: str

    def moved(self, deviations: float) -> tuple[float, ...]:
        """Return the acceptance so many deviations above this one."""
        return tuple(min(0.95, max(0.02, a + deviations * self.deviation)) for a in self.by_depth)


# From MT-bench: means of three heads in vLLM's regression test (tests/v1/spec_decode/test_acceptance_length.py:
# Llama-3.1-8B, Qwen3-8B and gpt-oss-20b; their means over the depths differ by 0.06); the chain of EAGLE-1's paper.
TYPICAL = {
    "eagle3": Acceptance((0.70, 0.68, 0.61), 0.06, "typical: mean of three heads in vLLM's tests, MT-bench"),
    "eagle1": Acceptance((0.79, 0.74, 0.72, 0.73, 0.67), 0.06, "typical: EAGLE-1's paper, Vicuna-7B, MT-bench"),
    "mtp": Acceptance((0.85, 0.68, 0.61), 0.10, "typical: DeepSeek-V3's report for depth 1; EAGLE-3's for the others"),
    "small_model": Acceptance((0.6,), 0.12, "typical: a guess, as it depends on the two models"),
    "suffix": Acceptance((0.45,), 0.15, "typical: tau 1.84 of prompt lookup in EAGLE-2's tables; the text decides"),
}
SAME = {"eagle2": "eagle1", "seagle": "eagle3", "prompt_lookup": "suffix"}  # as far as this arithmetic goes
METHODS = tuple(sorted({*TYPICAL, *SAME}))
MEASURED_DEVIATION = 0.05  # held-out text is not the user's


@dataclass(frozen=True)
class Head:
    """A draft: weights by use, and acceptance."""

    name: str
    method: str
    once: int  # weights that are read once a draft
    level: int  # and once a level
    shared: int  # weights of the target's output matrix that each level reads, kept as the target's
    layers: int  # layers that a level runs
    stored: float  # numbers of keys and values that a token leaves
    acceptance: Acceptance

    @property
    def chain_only(self) -> bool:
        """Whether it drafts no trees."""
        return self.level == 0


def check_method(method: str) -> str:
    """Return the method whose arithmetic holds for this one. Raise OptionError where there is none."""
    if method not in METHODS:
        raise OptionError(f"there is no arithmetic for {method!r}; {near(method, METHODS)}")
    return SAME.get(method, method)


def read_head(source: str | None, method: str | None, model: Model, acceptance: Sequence[float] | None = None) -> Head:
    """Return the draft that a folder, a hub id or a config.json describes; without one, a typical head of the
    method (eagle3), of the target's layer.

    Args:
        acceptance: by depth, instead of the measured or typical one.

    Raises:
        InputError, CheckpointError, OptionError: one line that names the mistake.
    """
    given = None if acceptance is None else Acceptance(tuple(acceptance), 0.0, "given")
    if source is None:
        kind = check_method(method or "eagle3")
        if kind == "small_model":
            raise OptionError("--method small_model needs --draft: the small model")
        known = given or TYPICAL[kind]
        return _made(f"a typical head of {method or 'eagle3'}", kind, {}, model, known)
    folder = _folder(source)
    config = _object(folder / "config.json", source)
    training = _object(folder / "training.json", source) if (folder / "training.json").is_file() else {}
    stated = method or training.get("method") or _method_of(config)
    kind = check_method(str(stated))
    known = given or _measured(training.get("heldout")) or TYPICAL[kind]
    if kind == "small_model":
        small = read_model(source)
        return Head(source, kind, 0, round(small.read(1)), 0, small.layers, small.stored + small.windowed, known)
    _check_sizes(config, model, source)
    return _made(source, kind, config, model, known)


def _made(name: str, method: str, config: Mapping[str, Any], model: Model, acceptance: Acceptance) -> Head:
    """Return a head of one layer, by the sizes in its config.json, or else the target's."""
    if method == "suffix":
        return Head(name, method, 0, 0, 0, 0, 0.0, acceptance)
    D, inner = model.hidden, int(config.get("intermediate_size") or model.inner)
    heads = int(config.get("num_attention_heads") or model.heads)
    kv_heads = int(config.get("num_key_value_heads") or model.kv_heads)
    width = int(config.get("head_dim") or model.width)
    inputs = 2 * D if method == "eagle3" else D  # EAGLE-3's attention reads embedding and feature side by side
    layer = inputs * (heads + 2 * kv_heads) * width + heads * width * D + 3 * D * inner
    stored = 2.0 * kv_heads * width
    if method == "eagle3":
        vocab = int(config.get("draft_vocab_size") or min(DRAFT_VOCAB, model.vocab))
        return Head(name, method, 3 * D * D, layer + vocab * D, 0, 1, stored, acceptance)
    return Head(name, method, 0, layer + 2 * D * D, model.vocab * D, 1, stored, acceptance)


def _method_of(config: Mapping[str, Any]) -> str:
    """Return the method of a head by its config.json."""
    if config.get("model_type") == "eyas_mtp":
        return "mtp"
    if "draft_vocab_size" in config or config.get("speculators_model_type") == "eagle3":
        return "eagle3"
    if config.get("num_hidden_layers") == 1:
        return "eagle1"
    return "small_model"


def _measured(heldout: Any) -> Acceptance | None:
    """Return the figures that a training measured on held-out text; None where it did not. Each depth is
    weighed against the mean of all, as deep ones are seen rarely: after n accepted tokens, the n-th power of
    their mean."""
    if not isinstance(heldout, dict):
        return None
    alphas = [heldout.get(f"{n}-alpha") for n in range(16)]
    known = [float(a) for a in alphas if isinstance(a, int | float)]
    if not known:
        return None
    weights = [1.0]
    for alpha in known[:-1]:
        weights.append(weights[-1] * alpha)
    mean = sum(w * a for w, a in zip(weights, known, strict=True)) / sum(weights)
    smooth = tuple(round(w * a + (1 - w) * mean, 4) for w, a in zip(weights, known, strict=True))
    return Acceptance((*smooth, round(mean, 4)), MEASURED_DEVIATION, "measured when the head was trained")


def _check_sizes(config: Mapping[str, Any], model: Model, source: str) -> None:
    if (width := config.get("hidden_size", model.hidden)) != model.hidden:
        raise CheckpointError(
            f"draft head {source} has a hidden size of {width}, and the target's is {model.hidden}: another model's head"
        )


def _folder(source: str) -> Path:
    """Return the folder with a config.json, which is fetched from the hub if necessary."""
    path = Path(source).expanduser()
    if path.is_dir() or path.is_file():
        return path if path.is_dir() else path.parent
    import huggingface_hub

    try:
        with suppress(Exception):  # most heads have none
            huggingface_hub.hf_hub_download(source, "training.json")
        return Path(huggingface_hub.hf_hub_download(source, "config.json")).parent
    except Exception as error:  # the hub's client raises errors of several libraries
        raise CheckpointError(
            f"draft head {source}: no such folder, and the hub has none: {first_line(error)}"
        ) from error


def _object(path: Path, source: str) -> dict[str, Any]:
    try:
        content = parse_json(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"draft head {source}: {path.name} cannot be read ({error.strerror})") from error
    except InputError as error:
        raise CheckpointError(f"draft head {source}: {path.name} is {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"draft head {source}: {path.name} is not a JSON object: {json.dumps(content)[:40]}")
    # speculators' heads keep the layer's sizes apart
    inner = content.get("transformer_layer_config")
    return {**inner, **content} if isinstance(inner, dict) else content
