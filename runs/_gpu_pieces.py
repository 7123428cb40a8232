"""Pieces of runs/gpu.py that look below a cycle: attention alone, a draft alone, the kernels of a
cycle; and transformers' own generate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from _gpu_lab import Entry, Lab, elapsed_ms, random_like
from random_target import SHAPES
from torch import Tensor
from torch.autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity

from eyas.core.drafter import CycleInput
from eyas.core.engine import Decoder, Request
from eyas.core.sampling import GumbelNoise, Sampling
from eyas.nn import grouped_attention
from eyas_gpu.operators import attention
from eyas_lab.bench.simulate import simulated

NODES = (1, 60)  # of a plain step and of a tree
LAYERS = 32  # of keys and values, read by turns: those of one layer would stay in a GPU's cache
TRACED = 6  # cycles
LISTED = 24  # kernels

Record = dict[str, Any]


def attention_rows(lab: Lab, context: int) -> Record:
    """Attention of one layer over so many slots, by the backends of torch and by eyas' kernel."""
    sizes, device = SHAPES[lab.plan.shape], lab.device
    H, K = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    h, W, layers = sizes["hidden_size"] // H, context + 64, LAYERS if device.type == "cuda" else 2
    dtype = getattr(torch, lab.plan.dtype)
    stores = [random_like(2, 1, K, W, h, device=device, dtype=dtype) for _ in range(layers)]
    rows = []
    for nodes in NODES:
        q = random_like(1, H, nodes, h, device=device, dtype=dtype)
        for name, attend in _contestants(q, context, W).items():
            turn, what = iter(range(10**9)), {"nodes": nodes, "slots": W, "by": name}
            try:
                ms = elapsed_ms(lambda: attend(*stores[next(turn) % layers]), device, lab.plan.repeats)  # noqa: B023 - called at once
                error = _error(attend(*stores[0]), _exact(q, stores[0][0], stores[0][1], context))
            except RuntimeError as reason:
                rows.append({**what, "us": None, "why": str(reason).splitlines()[0][:60]})
                continue
            read = stores[0].numel() * stores[0].element_size()
            rows.append({**what, "us": [1e3 * x for x in ms], "TB/s": read / ms[0] / 1e9, "error": error})
    return {"rows": rows}


def _contestants(q: Tensor, context: int, width: int) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Ways to attend: (keys, values) [1, K, W, h] -> [1, H, N, h]."""
    mask = _mask(q, context, width)
    additive = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, torch.finfo(q.dtype).min)

    def by(backend: SDPBackend) -> Callable[[Tensor, Tensor], Tensor]:
        def attend(key: Tensor, value: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return grouped_attention(q, key, value, additive)

        return attend

    backends = {"efficient": SDPBackend.EFFICIENT_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
    chosen = backends if q.device.type == "cuda" else {"flash": SDPBackend.FLASH_ATTENTION}
    others = {name: by(backend) for name, backend in {**chosen, "math": SDPBackend.MATH}.items()}
    nodes = q.shape[2]
    length_1 = torch.full((1,), context, device=q.device)
    visible = mask[0, :, :, context : context + nodes]
    position = length_1[:, None] + torch.arange(nodes, device=q.device).clamp(max=1)
    q_RQHh, scale = q.transpose(1, 2).contiguous(), q.shape[-1] ** -0.5

    def ours(key: Tensor, value: Tensor) -> Tensor:
        return attention(q_RQHh, key, value, length_1, visible, position, scale).transpose(1, 2)

    return {**others, "eyas": ours}


def _mask(q: Tensor, context: int, width: int) -> Tensor:
    """bool [1, 1, N, W]: the committed slots, and the node itself and the root among those behind them."""
    mask = torch.zeros(1, 1, q.shape[2], width, dtype=torch.bool, device=q.device)
    mask[..., : context + 1] = True
    nodes = torch.arange(q.shape[2], device=q.device)
    mask[0, 0, nodes, context + nodes] = True
    return mask


def _exact(q: Tensor, key: Tensor, value: Tensor, context: int) -> Tensor:
    """The same in float32 by plain products."""
    groups = q.shape[1] // key.shape[1]
    wide = [x.float().repeat_interleave(groups, 1) for x in (key, value)]
    scores = (q.float() @ wide[0].transpose(2, 3)) * q.shape[-1] ** -0.5
    return scores.masked_fill(~_mask(q, context, key.shape[2]), -torch.inf).softmax(-1) @ wide[1]


def _error(ours: Tensor, exact: Tensor) -> float:
    """Relative error of all numbers together."""
    return float((ours.float() - exact).norm() / exact.norm())


@torch.inference_mode()
def draft_ms(lab: Lab, entry: Entry, context: int) -> list[float]:
    """Milliseconds of one draft behind so many tokens, recorded and replayed, one row. Its features
    are random."""
    drafter = lab.drafter(entry)
    target, session, device = drafter.target, drafter.open(1), lab.device
    width = target.hidden_size * len(drafter.feature_layers)
    session.begin(0, 0, context)
    for begin in range(0, context, 512):
        count = min(512, context - begin)
        features = random_like(count, width, device=device, dtype=target.dtype)
        session.prefill(0, torch.full((count,), 7, device=device), features, begin)
    one_1 = torch.ones(1, dtype=torch.long, device=device)
    noise, sampling = GumbelNoise.from_sampling([Sampling()], device), (Sampling(),)
    cycle_input = CycleInput(7 * one_1, context * one_1, one_1 > 0, sampling, noise, context, active_rows=(0,))
    capturable = session.capturable(cycle_input)
    assert capturable is not None
    state = {name: getattr(session, name).clone() for name in capturable.state}

    def work() -> Any:
        for name, value in state.items():
            setattr(session, name, value)
        return session.draft(cycle_input)

    _, replay = target.runner.capture(work, lambda: None)  # type: ignore[attr-defined]
    return elapsed_ms(replay, device, lab.plan.repeats)


def kernel_rows(lab: Lab, entry: Entry, context: int) -> Record:
    """The kernels of recorded cycles by their names: how often, how long; and the device's idle time."""
    drafter = lab.drafter(entry)
    decoder = Decoder(drafter.target, drafter, verify=simulated((0.8, 0.7)))
    dice = torch.Generator().manual_seed(0)
    prompt = torch.randint(3, drafter.target.vocab_size, (context,), generator=dice).tolist()
    decoder.add(Request(tuple(prompt), 12 * (TRACED + lab.plan.warm + 2)))
    for _ in range(1 + lab.plan.warm):
        decoder.step()
    on_gpu = lab.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with torch.profiler.profile(activities=activities) as profiler:
        traced_ms = elapsed_ms(decoder.step, lab.device, TRACED - 3)
    count, micros = Counter[str](), Counter[str]()
    for event in profiler.key_averages():
        # what the host called; its kernels have entries of their own
        if on_gpu and event.device_type != DeviceType.CUDA:
            continue
        time_us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if time_us:
            count[event.key], micros[event.key] = event.count, time_us
    listed = [
        {"kernel": name[:90], "a cycle": count[name] / TRACED, "us a cycle": us / TRACED}
        for name, us in micros.most_common(LISTED)
    ]
    whole = {"kernel": "all", "a cycle": sum(count.values()) / TRACED, "us a cycle": sum(micros.values()) / TRACED}
    return {"rows": [whole, *listed], "cycle_ms_while_traced": traced_ms, "kernels": dict(count), "us": dict(micros)}


def reference_rows(lab: Lab, how: str, context: int) -> Record:
    """Milliseconds a token of transformers' generate: answers of two lengths, whose difference is timed."""
    model: Any = lab.model(lab.plan.shape)
    few, many = lab.plan.reference_tokens
    ids = torch.randint(3, model.config.vocab_size, (1, context), device=lab.device)
    options: dict[str, Any] = {} if how == "dynamic" else {"cache_implementation": "static"}
    options |= {"disable_compile": True} if how == "static" else {}
    options |= {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}

    def answer_ms(new: int) -> float:
        def work() -> None:
            model.generate(ids, max_new_tokens=new, min_new_tokens=new, **options)

        return elapsed_ms(work, lab.device, 3)[0]

    short, long = answer_ms(few), answer_ms(many)
    row = {"generate": how, "context": context, "ms a token": (long - short) / (many - few)}
    return {"rows": [{**row, f"ms of {few}": short, f"ms of {many}": long}]}
