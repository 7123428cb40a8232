"""A target's folder with something wrong in it: eyas serves it or says in one line what is wrong;
it never ends in a traceback.

Guards the mutants that once escaped as exceptions of transformers, tokenizers, safetensors, torch and jinja2.
A mutant is a small model saved to a folder and one change of its files, drawn from a seed.
"""

import json
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import eyas
import toy_tokenizer
import zoo
from eyas.errors import EyasError

SEED = 17
MOST = 400  # characters of a message
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_hidden_layers": 2}  # the kernels' too
WEIGHTS, INDEX, PICKLED = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"

Mutant = Callable[[Path], None]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    zoo.tiny("llama", eos_token_id=1, vocab_size=toy_tokenizer.VOCAB, **SIZES).save_pretrained(folder)
    toy_tokenizer.byte_tokenizer().save_pretrained(folder)
    return folder


def in_json(name: str, change: Callable[[Any], Any]) -> Mutant:
    """Change the object in a JSON file; what `change` returns, if anything, takes its place."""

    def mutate(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        changed = change(content)
        (folder / name).write_text(json.dumps(content if changed is None else changed))

    return mutate


def with_value(name: str, *keys: str | int, value: Any) -> Mutant:
    """Put a value where the keys lead."""

    def change(content: Any) -> None:
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return in_json(name, change)


def without(name: str, *keys: str | int) -> Mutant:
    def change(content: Any) -> None:
        for key in keys[:-1]:
            content = content[key]
        content.pop(keys[-1])

    return in_json(name, change)


def as_bytes(name: str, content: bytes | Callable[[bytes], bytes]) -> Mutant:
    def mutate(folder: Path) -> None:
        path = folder / name
        path.write_bytes(content(path.read_bytes()) if callable(content) else content)

    return mutate


def cut(name: str, share: float) -> Mutant:
    return as_bytes(name, lambda whole: whole[: int(share * len(whole))])


def in_weights(change: Callable[[dict[str, Tensor]], object]) -> Mutant:
    def mutate(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})

    return mutate


def poisoned(name: str, value: float = float("nan")) -> Mutant:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name].view(-1)[tensors[name].numel() // 2] = value

    return in_weights(change)


def as_pickle(keep: Callable[[dict[str, Tensor]], Any], share: float = 1.0) -> Mutant:
    """The weights as a pickle instead of safetensors."""

    def mutate(folder: Path) -> None:
        torch.save(keep(load_file(folder / WEIGHTS)), folder / PICKLED)
        (folder / WEIGHTS).unlink()
        cut(PICKLED, share)(folder)

    return mutate


def sharded(index: Any) -> Mutant:
    def mutate(folder: Path) -> None:
        (folder / WEIGHTS).rename(folder / "model-00001-of-00001.safetensors")
        (folder / INDEX).write_text(index if isinstance(index, str) else json.dumps(index))

    return mutate


class Intruder:
    """A pickle that would run code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("the pickle ran code",))


EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
QUERY = "model.layers.1.self_attn.q_proj.weight"
DEEP = b"[" * 60_000
LONG = b'{"model_type": "llama", "hidden_size": ' + b"9" * 5_000 + b"}"

ABACUS = {"quant_method": "abacus"}
NAMED: dict[str, Mutant] = {
    "config: no layers": with_value("config.json", "num_hidden_layers", value=0),
    "config: a billion layers": with_value("config.json", "num_hidden_layers", value=10**9),
    "config: a list": in_json("config.json", lambda _: [1, 2]),
    "config: empty": as_bytes("config.json", b""),
    "config: no text": as_bytes("config.json", b"\xff\xfe\x00\x01"),
    "config: 60,000 brackets": as_bytes("config.json", DEEP),
    "config: a number of 5,000 digits": as_bytes("config.json", LONG),
    "config: unknown type": with_value("config.json", "model_type", value="lama"),
    "config: type of another family": with_value("config.json", "model_type", value="gpt2"),
    "config: unknown rotary positions": with_value("config.json", "rope_parameters", value={"rope_type": "spiral"}),
    "config: fewer layers than weights": with_value("config.json", "num_hidden_layers", value=1),
    "config: heads that do not divide": with_value("config.json", "num_key_value_heads", value=3),
    "config: code of its own": with_value("config.json", "auto_map", value={"AutoConfig": "a.B"}),
    "config: unknown dtype": with_value("config.json", "dtype", value="float17"),
    "config: quantised by something unknown": with_value("config.json", "quantization_config", value=ABACUS),
    "generation: half of it": cut("generation_config.json", 0.5),
    "generation: ends with a word": with_value("generation_config.json", "eos_token_id", value="</s>"),
    "tokenizer: half of it": cut("tokenizer.json", 0.5),
    "tokenizer: empty": as_bytes("tokenizer.json", b""),
    "tokenizer: no text": as_bytes("tokenizer.json", b"\xff\xfe\x00\x01"),
    "tokenizer: 60,000 brackets": as_bytes("tokenizer.json", DEEP),
    "tokenizer: unknown model": with_value("tokenizer.json", "model", "type", value="LZW"),
    "tokenizer: a merge of unknown tokens": with_value("tokenizer.json", "model", "merges", value=[["qq", "zz"]]),
    "tokenizer: ids that are words": with_value("tokenizer.json", "model", "vocab", value={"a": "b"}),
    "tokenizer: without added tokens": without("tokenizer.json", "added_tokens"),
    "tokenizer: added tokens past the model": with_value("tokenizer.json", "added_tokens", 0, "id", value=10**6),
    "tokenizer config: half of it": cut("tokenizer_config.json", 0.5),
    "tokenizer config: unknown class": with_value("tokenizer_config.json", "tokenizer_class", value="NoTokenizer"),
    "tokenizer config: length in words": with_value("tokenizer_config.json", "model_max_length", value="long"),
    "tokenizer config: a template that is a number": with_value("tokenizer_config.json", "chat_template", value=5),
    "template: does not parse": as_bytes("chat_template.jinja", b"{% for m in messages %}{{ m }"),
    "template: raises": as_bytes("chat_template.jinja", b"{{ messages[0].nothing.at_all }}"),
    "template: says nothing": as_bytes("chat_template.jinja", b""),
    "weights: none": lambda folder: (folder / WEIGHTS).unlink(),
    "weights: empty": as_bytes(WEIGHTS, b""),
    "weights: half of them": cut(WEIGHTS, 0.5),
    "weights: a part of the header": as_bytes(WEIGHTS, lambda whole: whole[:100]),
    "weights: a header of many bytes": as_bytes(WEIGHTS, lambda whole: b"\xff" * 8 + whole[8:]),
    "weights: one is missing": in_weights(lambda tensors: tensors.pop(QUERY)),
    "weights: one is transposed": in_weights(lambda tensors: tensors.update({QUERY: tensors[QUERY][:32].clone()})),
    "weights: one too many": in_weights(lambda tensors: tensors.update(extra=torch.zeros(3))),
    "weights: whole numbers": in_weights(lambda tensors: tensors.update({HEAD: tensors[HEAD].to(torch.int8)})),
    "weights: NaN in the embedding": in_weights(lambda tensors: tensors[EMBEDDING].fill_(float("nan"))),
    "weights: NaN in a layer": poisoned(QUERY),
    "weights: NaN in the head": poisoned(HEAD),
    "weights: infinite": poisoned(QUERY, float("inf")),
    "weights: pickled": as_pickle(lambda tensors: tensors),
    "weights: a pickle that runs code": as_pickle(lambda tensors: {**tensors, "x": Intruder()}),
    "weights: a pickle of another kind": lambda folder: (
        (folder / WEIGHTS).unlink(),
        (folder / PICKLED).write_bytes(pickle.dumps([1])),
    )[0],
    "shards: one is missing": sharded({"metadata": {}, "weight_map": {HEAD: "model-00002-of-00002.safetensors"}}),
    "shards: outside of the folder": sharded({"metadata": {}, "weight_map": {HEAD: "../../model.safetensors"}}),
    "shards: an index without files": sharded({"metadata": {}}),
    "shards: half of an index": sharded('{"weight_map": {"a":'),
}
VALUES: tuple[Any, ...] = (None, "x", "", -1, 0, 1.5, True, [], {}, [1, 2], {"a": 1}, "48")
FIELDS = (
    "architectures", "attention_bias", "attention_dropout", "bos_token_id", "dtype", "eos_token_id", "head_dim", "hidden_act",
    "hidden_size", "initializer_range", "intermediate_size", "max_position_embeddings", "mlp_bias", "num_attention_heads",
    "num_hidden_layers", "num_key_value_heads", "pad_token_id", "pretraining_tp", "rms_norm_eps", "rope_parameters",
    "tie_word_embeddings", "use_cache", "vocab_size",
)  # fmt: skip


def drawn(count: int = 24) -> dict[str, Mutant]:
    """Fields of the configuration with values that do not belong there."""
    dice, mutants = random.Random(SEED), dict[str, Mutant]()
    while len(mutants) < count:
        field, value = dice.choice(FIELDS), dice.choice(VALUES)
        mutants[f"config: {field} = {value!r}"] = with_value("config.json", field, value=value)
    return mutants


MUTANTS = NAMED | drawn()


@pytest.mark.quick(
    "config: no layers", "config: unknown *", "*: empty", "*: no text", "*: one is missing", "weights: NaN in a layer"
)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_works_or_is_refused_in_one_line(name: str, sound: Path, tmp_path: Path) -> None:
    folder = tmp_path / "target"
    shutil.copytree(sound, folder)
    MUTANTS[name](folder)
    try:
        llm = eyas.load(folder, method="vanilla")
        llm.generate("Hi" if llm.tokenizer else [5, 6, 7], max_new_tokens=3)
    except EyasError as error:
        message = str(error)
        assert message
        assert "\n" not in message
        assert len(message) < MOST
        print(message)
    else:
        print("works")
