"""Engines of others, in environments of their own, with heads that `eyas export` wrote for them.

`make interop` makes the environments (.venv-interop: vLLM's CPU build and speculators;
.venv-openvino) and runs these tests. Elsewhere they are skipped, and so is each engine that cannot
be installed. llama.cpp is compiled, which takes long: LLAMA_CPP names a folder with its sources,
whose build is there too. An engine is a process that knows nothing of eyas but the folders.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import eyas
import processes
from eyas import checkpoints, tiny
from eyas.core.target import Target
from eyas.drafters import find
from eyas_lab.bench import tasks
from eyas_train import exports
from interop_engines import VARIABLE, python_of

BLOCK = 5  # slots of the block heads that are trained here


@pytest.fixture(scope="session", autouse=True)
def asked_for() -> None:
    """Skips everything, before anything is loaded, unless `make interop` runs these tests."""
    if not os.environ.get(VARIABLE):
        pytest.skip(f"other engines are not installed here ({VARIABLE} is not set): make interop")


@pytest.fixture(scope="session")
def interop() -> Path:
    """Python with vLLM and speculators."""
    return python_of(".venv-interop")


@pytest.fixture(scope="session")
def llm() -> eyas.LLM:
    """The embedded model, decoding plainly."""
    if not (tiny.FOLDER / tiny.PACKED).exists():
        pytest.skip("the embedded model's weights are not in this checkout")
    return eyas.load(method="vanilla", kernels="off")


@pytest.fixture(scope="session")
def folder(llm: eyas.LLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model as transformers saves it."""
    made: Path = tmp_path_factory.mktemp("embedded")
    llm.target.model.save_pretrained(made)
    assert llm.tokenizer is not None
    llm.tokenizer.save_pretrained(made)
    return made


@pytest.fixture(scope="session")
def prompts(llm: eyas.LLM) -> list[list[int]]:
    """The first turns of the bundled prompts, as ids."""
    return [list(llm.ids(prompt.turns[0])) for prompt in tasks.load("bundled")]


@pytest.fixture(scope="session")
def known(llm: eyas.LLM, folder: Path) -> checkpoints.ExportTarget:
    """The properties of the embedded model that an export may ask for."""
    every_V = torch.arange(llm.target.vocab_size)
    return checkpoints.ExportTarget(str(folder), ("LlamaForCausalLM",), lambda: llm.target.embed(every_V))


@pytest.fixture(scope="session")
def heads(llm: eyas.LLM, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Heads of the embedded model by name: its own, and two made of its EAGLE-3 head: with a second
    layer, and for drafting in parallel."""
    folder, head = tmp_path_factory.mktemp("made"), checkpoints.load(tiny.HEADS["eagle3"])
    made = {"eagle3 of two layers": with_second_layer(head), "peagle": with_mask(head, llm.target, prompts)}
    for name, weights in made.items():
        checkpoints.save(weights, folder / name)
    return {**tiny.HEADS, **{name: folder / name for name in made}}


def with_second_layer(head: checkpoints.Weights) -> checkpoints.Weights:
    """The head with a second layer of random weights, small enough that much is still accepted, and
    large enough that it matters."""
    noise = torch.Generator().manual_seed(0)
    tensors = dict(head.tensors)
    for name, tensor in head.tensors.items():
        if not name.startswith("layer.") or name.endswith("embed_norm.weight"):
            continue
        later = name.replace("layer.", "later.0.", 1).replace("hidden_norm", "input_norm")
        if tensor.ndim == 1:
            tensors[later] = tensor.clone()
            continue
        columns = tensor.shape[1] // 2 if name.endswith(("q.weight", "k.weight", "v.weight")) else tensor.shape[1]
        made = 5.0 / columns**0.5 * torch.randn(len(tensor), columns, generator=noise)
        tensors[later] = made.to(tensor.dtype)
    return replace(head, config={**head.config, "layers": 2}, tensors=tensors)


def with_mask(head: checkpoints.Weights, target: Target, prompts: list[list[int]]) -> checkpoints.Weights:
    """The head as P-EAGLE's: the features of a mask are the mean features of some texts."""
    layers = find("eagle3").load(head, target).feature_layers
    features_NF = torch.cat([target.encode(torch.tensor([ids]), layers)[0] for ids in prompts])
    mask_F = features_NF.mean(0).to(head.tensors["fc.weight"].dtype)
    return replace(
        head, method="peagle", config={**head.config, "mask_token": 0, "levels": 3}, tensors={**head.tensors, "mask_hidden": mask_F}
    )  # fmt: skip


@pytest.fixture(scope="session")
def trained(llm: eyas.LLM, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a small block head of the embedded model, which has learnt the answers to the prompts by heart: what
    another engine computes differently is then seen in what it accepts."""
    folder, known = tmp_path_factory.mktemp("trained"), {}

    def made(method: str) -> Path:
        if method not in known:
            data, known[method] = folder / "chats.jsonl", folder / method
            if not data.exists():
                data.write_text("".join(json.dumps(chat) + "\n" for chat in _chats(llm)))
            options = f"--method {method} --head.layers 1,3,5 --head.depth 1 --head.block {BLOCK} --steps 100 --lr 2e-3"
            more = "--batch-tokens 2048 --heldout 0 --eval-every 0"
            command = [sys.executable, "-m", "eyas", "train", "--data", data, "--output", known[method]]
            done = processes.run([*command, *options.split(), *more.split()])
            assert done.returncode == 0, done.stderr
        return known[method]

    return made


def _chats(llm: eyas.LLM) -> Iterator[dict[str, list[dict[str, str]]]]:
    for prompt in tasks.load("bundled"):
        answer = llm.generate(prompt.turns[0], max_new_tokens=64).text
        said = (("user", prompt.turns[0]), ("assistant", answer))
        yield {"messages": [{"role": role, "content": content} for role, content in said]}


@pytest.fixture(scope="session")
def exported(
    known: checkpoints.ExportTarget,
    heads: dict[str, Path],
    trained: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str, str], Path]:
    """The folder of one of the heads, or of one that is trained here, in a format."""

    def made(head: str, name: str) -> Path:
        place = tmp_path_factory.mktemp("heads") / f"{head.replace(' ', '-')}-{name}"
        exports.export(checkpoints.load(heads.get(head) or trained(head)), name, place, known)
        return place

    return made
