"""This CPU as a `Machine`, measured by models with random weights that eyas decodes as it decodes any other.

    overheads   a narrow model of few and of many layers: what a pass, a layer, a cycle, a draft and a level take
                where weights are next to nothing
    rates       a model that fits the caches: operations a second by tokens, where nothing is read from memory
    bandwidth   a model that does not: bytes a second of a pass over one token, where operations are few; and from its
                passes over more tokens, how much of reading and computing overlaps

The fastest of several passes counts, as other processes only make them slower. None of these models has the shape of
a model that is predicted. It takes half a minute, and is kept in the user's cache folder for this processor, number of
threads, format and version.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from eyas import api, drafters
from eyas.adaptive.cost import MAX_OTHERS
from eyas.core.drafter import Drafter, TreeSize
from eyas.core.engine import Decoder, Request
from eyas.core.requests import check_steps
from eyas.core.target import Target
from eyas.errors import EyasError
from eyas.files import parse_json, user_cache, write_atomically
from eyas.hardware import cpu_name, versions
from eyas.hardware.machine import snapshot, used
from eyas.passes import repeated_token, time_drafts, time_passes
from eyas_lab.predict.machines import Machine
from eyas_lab.predict.models import WEIGHT_BYTES, Model, model_of

__all__ = ["measure", "measured_machine"]

log = logging.getLogger("eyas.predict")  # the command line shows its messages

FORMAT = 2  # of the file
CONTEXT = 32  # committed tokens of the measured passes: few, as attention is counted apart
TOKENS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64)
OVERLAP_TOKENS = (1, 2, 4, 8, 16)
OVERLAPS = tuple(n / 10 for n in range(11))
FEW_LAYERS, MANY_LAYERS = 4, 20
LEVELS = 5  # of the longer of two timed drafts
NEW_TOKENS = 48  # of the text whose cycles are timed
DRAFT_FORMAT = ("int8", "int16")  # weights and activations in which the kernels keep a head
CACHE_SIZE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")  # "32768K"


class Shape(NamedTuple):
    """The sizes of a reference model."""

    hidden: int
    inner: int
    layers: int
    vocab: int


NARROW = Shape(64, 128, FEW_LAYERS, 8192)
CACHED = Shape(512, 1408, 1, 2048)  # 4M weights
LARGE = Shape(2048, 5632, 2, 4096)  # 96M weights


def measured_machine(weights: str, activations: str = "exact", force: bool = False) -> Machine:
    """Return this CPU with weights of a format, as it was measured before, or else measured now.

    Args:
        weights: "float32", "bfloat16", "int8" or "int4".
        activations: inputs of products, as for `eyas.load`.
        force: measure again in any case.
    """
    key = {
        "format": FORMAT,
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "weights": weights,
        "activations": activations,
        **versions(),
    }
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    path = user_cache() / f"machine-{name}.json"
    if not force:
        with suppress(OSError, EyasError, TypeError, KeyError):
            content = parse_json(path.read_bytes())
            if content["key"] == key:
                return Machine.from_json(content["machine"], str(path))
    log.info("measuring this CPU with weights in %s, which takes half a minute", weights)
    before = snapshot()
    machine = measure(weights, activations)
    if (others := used(before).share) > MAX_OTHERS:
        log.warning(
            "other processes used %.0f %% of the cores, so the prediction is doubtful and not kept", 100 * others
        )
        return machine
    with suppress(OSError):  # without a cache folder it is measured again the next time
        path.parent.mkdir(parents=True, exist_ok=True)
        with write_atomically(path) as stream:
            stream.write((json.dumps({"key": key, "machine": asdict(machine)}) + "\n").encode())
    return machine


def measure(weights: str, activations: str = "exact") -> Machine:
    """Measure this CPU with weights of a format."""
    source = f"measured here: {torch.get_num_threads()} threads, activations {activations}"
    machine = replace(_overheads(), source=source)
    rates = _rates(weights, activations, machine)
    draft = rates if (weights, activations) == DRAFT_FORMAT else _rates(*DRAFT_FORMAT, machine)
    machine = replace(machine, flops={weights: rates, "draft": draft})
    return _with_bandwidth(machine, weights, *_work(LARGE, weights, activations, OVERLAP_TOKENS, machine))


def _overheads() -> Machine:
    """Return a machine that is known but for its rates and its bandwidth."""
    few, _ = _target(NARROW, "float32", "exact")
    many, _ = _target(NARROW._replace(layers=MANY_LAYERS), "float32", "exact")
    short, long = (time_passes(target, CONTEXT, (1,), ()).fastest[1] for target in (few, many))
    layer = max(0.0, long - short) / (MANY_LAYERS - FEW_LAYERS)
    drafter = drafters.find("mtp").random(few)
    sizes = TreeSize(2, 1, 1), TreeSize(LEVELS + 1, LEVELS, 1)
    one, several = time_drafts(drafter, sizes, CONTEXT).fastest.values()
    level = max(0.0, several - one) / (LEVELS - 1)
    return Machine(
        name=cpu_name(),
        bandwidth=1.0,
        flops={},
        pass_seconds=max(0.0, short - FEW_LAYERS * layer),
        layer_seconds=layer,
        cycle_seconds=_rest(drafters.find("vanilla").random(few)),
        draft_cycle_seconds=_rest(drafter),
        draft_seconds=max(0.0, one - level),
        level_seconds=max(0.0, level - layer),
        cache_bytes=_cache_bytes(),
        draft_bytes=WEIGHT_BYTES[DRAFT_FORMAT[0]],
        number_bytes=4.0,
    )


def _rest(drafter: Drafter) -> float:
    """Return the seconds of a cycle besides its draft and its pass: the lower quartile of many."""
    decoder = Decoder(drafter.target, drafter)
    decoder.add(Request(tuple(repeated_token(drafter.target, CONTEXT)), NEW_TOKENS))
    rests = []
    while not decoder.finished:
        for step in check_steps(decoder.step()):
            known = sum(step.stage_seconds.get(stage, 0.0) for stage in ("draft", "target"))
            rests += [] if step.prefill else [step.seconds - known]
    return max(0.0, sorted(rests)[len(rests) // 4])


def _rates(weights: str, activations: str, machine: Machine) -> dict[int, float]:
    """Return operations a second by tokens, of a model in the caches. A smaller pass that took longer was disturbed."""
    work, model = _work(CACHED, weights, activations, TOKENS, machine)
    return {n: model.flops(n, CONTEXT) / min(took for m, took in work.items() if m >= n) for n in work}


def _with_bandwidth(machine: Machine, weights: str, work: Mapping[int, float], model: Model) -> Machine:
    """Return the machine with the bandwidth of a pass over one token, and the overlap with which passes over more
    tokens take the time that they took."""
    size, counting = WEIGHT_BYTES[weights] * model.weights, model.flops(1, CONTEXT)
    counting /= machine.rate(weights, 1)

    def made(overlap: float) -> Machine:
        reading = max(work[1] / 10, work[1] - (1 - overlap) * counting)
        return replace(machine, bandwidth=size / reading, overlap=overlap)

    def miss(candidate: Machine) -> float:
        seconds = (candidate.seconds(size, model.flops(n, CONTEXT), weights, n, math.inf)[0] for n in work)
        return sum(math.log(expected / took) ** 2 for expected, took in zip(seconds, work.values(), strict=True))

    return min(map(made, OVERLAPS), key=miss)


def _work(
    shape: Shape, weights: str, activations: str, tokens: Sequence[int], machine: Machine
) -> tuple[dict[int, float], Model]:
    """Return the seconds of passes without the overheads, by tokens, and the sizes of the model; a disturbed pass
    keeps a tenth."""
    target, model = _target(shape, weights, activations)
    overhead = machine.pass_seconds + model.layers * machine.layer_seconds
    fastest = time_passes(target, CONTEXT, tokens, ()).fastest
    return {n: max(took / 10, took - overhead) for n, took in fastest.items()}, model


def _target(shape: Shape, weights: str, activations: str) -> tuple[Target, Model]:
    """Return a LLaMA with random weights, as eyas loads it, and its sizes."""
    sizes = {"hidden_size": shape.hidden, "intermediate_size": shape.inner, "num_hidden_layers": shape.layers}
    heads = {"num_attention_heads": max(2, shape.hidden // 64), "num_key_value_heads": max(1, shape.hidden // 128)}
    config: Any = AutoConfig.for_model("llama", vocab_size=shape.vocab, tie_word_embeddings=False, **sizes, **heads)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32).eval()
    exact = "exact" if weights == "float32" else weights  # random numbers have no narrower format
    form: Any = {"kernels": "on", "weights": exact, "activations": activations}
    return api.load(model, method="vanilla", tokenizer=False, tree="fixed", **form).target, model_of(
        config, "reference"
    )


def _cache_bytes() -> float:
    """Return the size of the last level of cache; 0 where the system does not tell it."""
    with suppress(OSError, ValueError):
        return 1024.0 * int(CACHE_SIZE.read_text(encoding="ascii").strip().removesuffix("K"))
    return 0.0
