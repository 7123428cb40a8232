"""A target whose layers lie on several devices, behind the server: the texts are those of the model
on one device."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

import eyas
import zoo
from eyas import tiny
from serving import PROMPTS, running

pytest.importorskip("accelerate", reason="device maps need accelerate")

from accelerate import dispatch_model

from two_devices import halves

pytestmark = pytest.mark.slow


def test_rows_that_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four requests share two rows. The devices are two names of the CPU, as those of `two_gpus`
    are known to one thread only."""
    whole, tokenizer = (
        zoo.tiny("llama", vocab_size=len(tiny.tokenizer()), max_position_embeddings=1024),
        tiny.tokenizer(),
    )
    expected = [
        eyas.load(whole, "suffix", tokenizer=tokenizer, kernels="off").generate(p, max_new_tokens=12).text
        for p in PROMPTS
    ]
    places = [torch.device("cpu", index) for index in range(2)]
    monkeypatch.setattr("eyas.targets.placement.check_layers", lambda layers: None)  # weights say "cpu", hooks "cpu:1"
    monkeypatch.setattr(
        "eyas.targets.placement.devices_of", lambda cache: [places[k % 2] for k in range(len(cache.layers))]
    )
    monkeypatch.setattr("accelerate.hooks.set_module_tensor_to_device", lambda *_, **__: None)
    named = {name: f"cpu:{place}" for name, place in halves(whole).items()}
    model: Any = dispatch_model(whole, named, main_device="cpu:0", skip_keys=whole._skip_keys_device_placement)
    with pytest.warns(UserWarning, match="the kernels run whole models on one device"):
        llm = eyas.load(model, "suffix", tokenizer=tokenizer, kernels="on")
    assert list(llm.target.open(1).cache.bytes_by_device(1)) == places
    with running(llm, rows=2) as server, ThreadPoolExecutor(len(PROMPTS)) as pool:
        ask: Any = partial(server.client().chat.completions.create, model="tiny", max_tokens=12, temperature=0)
        asked = [pool.submit(ask, messages=[{"role": "user", "content": prompt}]) for prompt in PROMPTS]
        assert [answer.result().choices[0].message.content for answer in asked] == expected
