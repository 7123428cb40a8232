"""A process's default dtype and device, and autocast, change no id and no draft, or eyas refuses them."""

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import eyas
import reference
from eyas import drafters, kernels
from eyas.core.engine import Decoder, Request
from eyas.core.target import Target
from eyas.errors import OptionError
from eyas.kernels._records import address
from eyas.runners import with_fastest_runner
from reference import SAMPLINGS, run
from test_lossless import make

ROOT = Path(__file__).resolve().parents[1]
DEFAULTS = ("bfloat16", "float16", "float64", "meta")
MAKERS = {"empty", "zeros", "ones", "rand", "randn", "eye", "linspace"}
PROMPT = list(range(3, 43))
NEW = 16


@contextmanager
def default(name: str) -> Iterator[None]:
    """Set a default dtype, or a default device on which nothing can be computed."""
    if name == "meta":
        torch.set_default_device(name)
    else:
        torch.set_default_dtype(getattr(torch, name))
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def llama(**changes: Any) -> PreTrainedModel:
    """A model that the compiled kernels run."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
    common = {"vocab_size": 160, "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **common, **changes})).eval()


@cache
def model() -> PreTrainedModel:
    return llama()


@cache
def runnable(with_kernels: bool) -> Target:
    return with_fastest_runner(Target(model()), "on" if with_kernels and kernels.available() else "off")


def steps_of(drafter: drafters.Drafter) -> list[tuple[Any, ...]]:
    """What a method does with four requests in two rows: ids and accepted paths."""
    prompts = [tuple((7 * i * k + 3) % 150 for i in range(9 + k)) for k in range(len(SAMPLINGS))]
    requests = [Request(prompt, 12, sampling) for prompt, sampling in zip(prompts, SAMPLINGS, strict=True)]
    _, every = run(Decoder(drafter.target, drafter, 2), requests)
    return [(step.request_id, step.tokens, step.path) for step in every]


def generated(llm: eyas.LLM) -> list[int]:
    return list(llm.generate(PROMPT, max_new_tokens=NEW, ignore_eos=True).token_ids)


def plain(of: PreTrainedModel) -> list[int]:
    return reference.generated(of, PROMPT, NEW)


@pytest.mark.cover(name=10)
@pytest.mark.parametrize("with_kernels", [True, False], ids=["kernels", "own forward"])
@pytest.mark.parametrize("what", DEFAULTS)
@pytest.mark.parametrize("name", drafters.names())
def test_every_method_decodes_the_same(name: str, what: str, with_kernels: bool) -> None:
    """Bug: a tensor whose dtype or device nobody names: kernels write past its end, or ids or accepted paths change."""
    first, drafter = (make(name, runnable(with_kernels)) for _ in range(2))
    expected = steps_of(first)
    with default(what):
        assert steps_of(drafter) == expected


@pytest.mark.skipif(not kernels.available(), reason="no compiled kernels")
def test_kernels_take_no_other_memory() -> None:
    """Bug: an address of other numbers goes to C++, which reads or writes past their end."""
    assert address(None) is None
    assert address(torch.ones(3, dtype=torch.float32)) is not None
    for wrong in (torch.ones(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.long), torch.ones(3, device="meta")):
        with pytest.raises(AssertionError, match="the kernels take"):
            address(wrong)


def test_new_tensors_name_their_dtype() -> None:
    """Guards the source: who makes floats says which; weights of nets are made under `plain_defaults`."""
    silent = []
    for file in sorted([*ROOT.glob("src/**/*.py"), *ROOT.glob("packages/*/src/**/*.py")]):
        nodes = [node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
        weights = {id(part) for node in nodes if ast.unparse(node.func) == "nn.Parameter" for part in node.args}
        for node in nodes:
            makes = ast.unparse(node.func) in {f"torch.{maker}" for maker in MAKERS} and id(node) not in weights
            if makes and "dtype" not in {keyword.arg for keyword in node.keywords}:
                silent.append(f"{file.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)[:60]}")
    assert not silent


def test_autocast_is_refused() -> None:
    """Bug: layers' keys have another dtype than the cache, or kernels, which know no autocast, answer otherwise."""
    llm, tiny = eyas.load(model(), tokenizer=False, kernels="off"), eyas.load()
    wanted, chat, message = generated(llm), tiny.chat(max_new_tokens=8), "I want to book a table."
    with torch.autocast("cpu", dtype=torch.bfloat16):
        load, stream = lambda: eyas.load(model(), tokenizer=False), lambda: next(iter(llm.stream(PROMPT)))
        for refused in (load, stream, lambda: generated(llm), lambda: chat.send(message)):
            with pytest.raises(OptionError, match=r"torch.autocast is on.*enabled=False"):
                refused()
        with pytest.raises(OptionError, match=r"torch.autocast is on"), eyas.attach(model()):
            pass
        with torch.autocast("cpu", enabled=False):
            assert generated(llm) == wanted
    mixed = torch.autocast("cpu", dtype=torch.bfloat16)
    with eyas.attach(model()), mixed, pytest.raises(OptionError, match="autocast"):
        plain(model())
    assert generated(llm) == wanted
    assert chat.send(message).text == tiny.chat(max_new_tokens=8).send(message).text
