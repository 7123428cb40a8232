"""Programs of tests/core/test_tensor_parallel.py, each run by two processes that share a target's layers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import eyas
from eyas import drafters
from eyas.core.engine import Decoder, Request
from eyas.core.sampling import Sampling
from eyas.core.target import Target
from eyas.errors import ModelError
from eyas.targets.fingerprints import fingerprint
from reference import plain_decode, run
from test_lossless import DRAWN, make

REFUSED = ("gemma4_assistant", "glide", "kangaroo")  # they read all heads of the target's keys, or copy a layer
SAMPLINGS = (Sampling(), Sampling(1.0, seed=3), Sampling(0.8, top_k=9, seed=4), Sampling())
PROMPTS = ((5, 9, 3), tuple(range(20, 43)), (7,), (*range(20, 40), 3, 4))


def split_model(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, tp_plan="auto")
    assert model.model.layers[0].mlp.up_proj.weight.to_local().shape[0] * 2 == model.config.intermediate_size
    return model


def texts(folder: Path) -> dict[str, tuple[list[list[int]], list[list[int]]]]:
    """By method: the texts of plain decoding, and those of a Decoder of three rows for four requests."""
    model = split_model(folder)
    target, found = Target(model), {}
    requests = [Request(prompt, 10, sampling) for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True)]
    plain = [plain_decode(model, request) for request in requests]
    for name in REFUSED:
        with pytest.raises(ModelError, match="processes share the target's layers"):
            make(name, target)
    for name in (name for name in drafters.names() if name not in REFUSED):
        kept = [r.sampling.greedy or name not in DRAWN for r in requests]
        drafted, _ = run(
            Decoder(target, make(name, target), 3, reuse=True), [r for r, k in zip(requests, kept, strict=True) if k]
        )
        found[name] = [text for text, k in zip(plain, kept, strict=True) if k], drafted
    return found


def loaded(folder: Path) -> tuple[list[int], bool, str]:
    """The text of `eyas.load` with its default tree, whether it has a policy, and the target's fingerprint."""
    llm = eyas.load(split_model(folder), "suffix", kernels="on")
    return list(llm.generate([5, 9, 3], max_new_tokens=8).token_ids), llm.policy is not None, fingerprint(llm.target)
