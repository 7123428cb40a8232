"""Heads that llama.cpp's own converter wrote into GGUF files come back as the heads that they were made of, and
`eyas export --format gguf` writes the same files: every tensor has the same bytes, every setting the same value.

The converter is Python, so the sources are enough: LLAMA_CPP names them.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

import eyas
import processes
import zoo
from eyas import checkpoints
from eyas.checkpoints import Weights
from eyas.core.options import build_options
from eyas.core.target import Target
from eyas.drafters import find, mtp
from eyas.errors import CheckpointError
from eyas_train import exports
from interop_engines import ours, python_of

pytestmark = pytest.mark.slow
PROGRAM = Path(__file__).parents[2] / "runs" / "engines" / "to_gguf.py"
LLAMA3: dict[str, Any] = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 256
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0}
OTHERWISE = ("GGUF.", "general.name", "general.size_label", "general.basename", "general.finetune", "general.version")
SMALL = {"head.layers": "1,2", "head.depth": 2, "head.block": 6}
SECOND = {"head.taps": 3, "head.channels": 8, "head.selector_rank": 6, "head.candidates": 5}
# name -> (method, options, changes of our config)
BLOCKS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dflash": ("dflash", SMALL, {}),
    "dflash, windows": ("dflash", SMALL, {"windows": (None, 7), "causal": (False, True)}),
    "dflash, windows, both ways": ("dflash", SMALL, {"windows": (7, 7), "causal": ()}),
    "dflash, factors, yarn": ("dflash", SMALL, {"embed_scale": 3.0, "logit_scale": 0.5, "logit_cap": 2.0, "rope_scaling": YARN}),
    "dflash2": ("dflash2", {**SMALL, **SECOND}, {}),
    "dspark": ("dspark", {**SMALL, "head.markov_rank": 8}, {}),
}  # fmt: skip


@pytest.fixture(scope="module")
def sources() -> Path:
    if not os.environ.get("LLAMA_CPP"):
        pytest.skip("no llama.cpp was named: make interop LLAMA_CPP=FOLDER, with its sources")
    return Path(os.environ["LLAMA_CPP"])


@pytest.fixture(scope="module")
def target_file(sources: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> checkpoints.ExportTarget:
    """The embedded model's own file."""
    file = tmp_path_factory.mktemp("target") / "target.gguf"
    return checkpoints.ExportTarget(str(converted(sources, folder, file, kind="f16")))


def assert_written(
    made: Weights, known: checkpoints.ExportTarget, theirs: Path, kind: str = "f32", atol: float = 0.0
) -> None:
    """Assert that an export of the head is the converter's file; names and sizes for readers may differ. `atol` is for
    numbers that both compute."""
    ours = theirs.with_name(f"ours-{theirs.name}")
    exports.export(made, "gguf", ours, known, kind)
    files = [gguf.GGUFReader(path) for path in (ours, theirs)]
    first, second = (
        {name: field.contents() for name, field in file.fields.items() if not name.startswith(OTHERWISE)}
        for file in files
    )
    assert first == second
    tensors = [{tensor.name: tensor for tensor in file.tensors} for file in files]
    assert tensors[0].keys() == tensors[1].keys()
    for name, tensor in tensors[0].items():
        other = tensors[1][name]
        assert (tensor.tensor_type, list(tensor.shape)) == (other.tensor_type, list(other.shape)), name
        if atol and tensor.tensor_type.name == "F32":
            np.testing.assert_allclose(tensor.data, other.data, rtol=0, atol=atol, err_msg=name)
        else:
            np.testing.assert_array_equal(tensor.data, other.data, err_msg=name)


def converted(
    sources: Path, model: Path, output: Path, target: Path | None = None, kind: str = "f32", *more: str
) -> Path:
    """A model, or a head with its target's folder, by llama.cpp's converter."""
    command = [python_of(".venv-interop"), PROGRAM, sources, kind, model, output, *([target] if target else []), *more]
    done = processes.run(command, env={**processes.environment(), "NO_LOCAL_GGUF": ""})
    assert done.returncode == 0, done.stderr[-3000:]
    return output


def assert_same(read: Weights, made: Weights, atol: float = 0.0) -> None:
    """Assert that the file holds the tensors and settings of the head that was converted."""
    assert read.method == made.method
    assert read.tensors.keys() == made.tensors.keys()
    for name, tensor in made.tensors.items():
        torch.testing.assert_close(read.tensors[name], tensor.to(read.tensors[name].dtype), rtol=0, atol=atol, msg=name)


@pytest.fixture
def eagle3(sources: Path, folder: Path, heads: dict[str, Path], tmp_path: Path) -> Callable[..., tuple[Weights, Path]]:
    """The embedded head with changes of its config, and the converter's file of it."""

    def made(kind: str = "f32", **changes: Any) -> tuple[Weights, Path]:
        head = checkpoints.load(heads["eagle3"])
        head.config.update(changes)
        exports.export(head, "sglang", tmp_path / kind, checkpoints.ExportTarget(str(folder)))
        return head, converted(sources, tmp_path / kind, tmp_path / f"{kind}.gguf", folder, kind)

    return made


def test_eagle3(
    eagle3: Callable[..., tuple[Weights, Path]],
    heads: dict[str, Path],
    prompts: list[list[int]],
    target_file: checkpoints.ExportTarget,
) -> None:
    """Guards rows of queries and keys, the map of the vocabulary, layer ids: the embedded head drafts what it drafts from its
    folder."""
    made, file = eagle3()
    read = checkpoints.load(file)
    assert_same(read, made)
    L = eyas.load(method="vanilla", kernels="off").target.num_layers
    assert read.config["feature_layers"] == (2, L // 2, L - 3)
    assert_written(made, target_file, file)
    few = prompts[:4]
    assert ours(few, file, "eagle3", 3, 32) == ours(few, heads["eagle3"], "eagle3", 3, 32)


def test_eagle3_with_llama3_rope(
    eagle3: Callable[..., tuple[Weights, Path]], heads: dict[str, Path], target_file: checkpoints.ExportTarget
) -> None:
    """Guards the scaling, of which the file holds the factors only."""
    made, file = eagle3(rope_scaling=LLAMA3)
    read = checkpoints.load(file)
    torch.testing.assert_close(frequencies(read), frequencies(made), rtol=1e-5, atol=0)
    assert not torch.allclose(frequencies(read), frequencies(checkpoints.load(heads["eagle3"])))
    assert_written(made, target_file, file, atol=1e-5)  # factors of up to 8, computed in 64 bits here


@pytest.mark.parametrize("kind", ["q8_0", "f16", "bf16"])
def test_a_rounded_head(
    kind: str, eagle3: Callable[..., tuple[Weights, Path]], target_file: checkpoints.ExportTarget
) -> None:
    """Guards that q8_0 is read within one rounding step of its blocks, and that our file of each type equals the converter's."""
    made, file = eagle3(kind)
    assert_written(made, target_file, file, kind)
    if kind == "q8_0":
        largest = max(float(tensor.abs().max()) for name, tensor in made.tensors.items() if name != "draft_ids")
        assert_same(checkpoints.load(file), made, atol=largest / 127)


@pytest.mark.parametrize("name", BLOCKS)
def test_block_heads(
    name: str, sources: Path, folder: Path, tmp_path: Path, llm: eyas.LLM, target_file: checkpoints.ExportTarget
) -> None:
    """Guards names, the window's layers and order, factors, and which token a slot predicts."""
    method, options, changes = BLOCKS[name]
    kind = find(method)
    made = kind.random(llm.target, build_options(kind.Options, options), seed=1).weights()
    made.config.update({"embed_scale": 1.0, "logit_scale": 1.0, **changes})
    checkpoints.save(made, tmp_path / "head")
    from_folder = checkpoints.load(tmp_path / "head")
    read = checkpoints.load(converted(sources, tmp_path / "head", tmp_path / "head.gguf", folder))
    assert_same(read, made)
    for key in set(from_folder.config) - {"eyas", "target_layers"}:
        assert read.config[key] == from_folder.config[key], key
    if name == "dflash, windows":  # the converter writes it, and llama.cpp lets all layers see later slots
        with pytest.raises(CheckpointError, match="layers that see earlier slots only"):
            assert_written(from_folder, target_file, tmp_path / "head.gguf")
    else:
        assert_written(from_folder, target_file, tmp_path / "head.gguf")


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"])
def test_mtp_modules(family: str, sources: Path, folder: Path, tmp_path: Path, llm: eyas.LLM) -> None:
    """Guards the names of a module behind the target's layers, norms that have 1 added, experts in one tensor."""
    sizes = zoo.DELTA_NET | (zoo.SHARED_EXPERT if family != "qwen3_5_text" else {})
    vocabulary = llm.target.vocab_size + 64  # room for the tokens that transformers adds for this family
    model = zoo.tiny(family, layer_types=zoo.STATE_THEN_ATTENTION, vocab_size=vocabulary, **sizes)
    target = Target(model)
    made = mtp.Method.random(target, seed=5).weights()
    for tensor in made.tensors.values():  # norms are not all alike
        if tensor.ndim == 1:
            tensor += torch.linspace(-0.3, 0.3, len(tensor))
    model.save_pretrained(tmp_path / "target")
    exports.export(made, "checkpoint", tmp_path / "whole", checkpoints.ExportTarget(str(tmp_path / "target")))
    llm.tokenizer.save_pretrained(tmp_path / "whole")  # type: ignore[union-attr]
    read = checkpoints.load(converted(sources, tmp_path / "whole", tmp_path / "whole.gguf"))
    assert_same(read, made, atol=1e-6)
    llm.tokenizer.save_pretrained(tmp_path / "target")  # type: ignore[union-attr]
    plain = converted(sources, tmp_path / "target", tmp_path / "target.gguf", None, "f32", "--no-mtp")
    assert_written(made, checkpoints.ExportTarget(str(plain)), tmp_path / "whole.gguf")
    loaded = mtp.Method.from_pretrained(tmp_path / "whole.gguf", target)
    assert isinstance(loaded, mtp.Method)
    assert read.config["target_model_type"] == target.family.model_type


def frequencies(head: Weights) -> Tensor:
    from eyas.drafters._nets import layer_shape
    from eyas.nn import rope_frequencies

    return rope_frequencies(layer_shape(head.config))
