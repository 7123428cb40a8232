"""A model in a file in GGUF format, as a folder in Hugging Face layout.

transformers reads such files; the result is written as float32, which holds every weight without loss.
The folder is kept in the user's cache:

    ~/.cache/eyas/gguf/KEY/    KEY hashes the file's bytes and the versions of transformers and gguf
    ~/.cache/eyas/gguf/KEY-0/  the same without weights: tensors.json says where they lie in the file

A kept folder that has changed on the disk is made again. Those that were used least recently are
removed once all of them take more than EYAS_GGUF_CACHE_GB (20).
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from huggingface_hub import hf_hub_download
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from eyas.errors import InputError, ModelError, OptionError, one_line
from eyas.files import CHECKSUMS, kept_sha256, sha256_of_folder, user_cache, write_errors, write_text
from eyas.locks import prepare_folder
from eyas.targets.gguf_configs import ARCHITECTURE, own_config
from eyas.targets.gguf_header import Header, read_header
from eyas.targets.kept import limit_bytes, remove_unused
from eyas.targets.pretrained import check_path, one_line_errors, read_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

__all__ = ["TENSORS", "as_folder", "check_gguf_packages", "kept_folder", "split_gguf"]

log = logging.getLogger(__name__)  # the command line shows its messages

TENSORS = "tensors.json"
FORMAT = 9  # version of the kept folders; a folder of another version is made again
ENDS_OF_TURNS = (  # as llama.cpp knows them
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<turn|>", "<EOT>",
    "<end_of_utterance>", "<|END_OF_TURN_TOKEN|>",
)  # fmt: skip
# Fields that transformers does not take for every family, and its names for them
WIDTHS = {".attention.key_length": "head_dim", ".expert_feed_forward_length": "moe_intermediate_size"}
TILED = ("qwen35", "qwen35moe")  # architectures whose value heads are in llama.cpp's order
# architectures whose norms multiply by 1 + weight, but for a state's
ADDS_ONE = ("gemma2", "gemma3", "nemotron", "qwen3next", *TILED)
# Tensors of layers that gguf's tables of names lack, in whole or in part
OF_LAYERS = {
    "layer_scalar": "layer_output_scale.weight", "self_attn.sinks": "attn_sinks.weight", "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias", "feed_forward.expert_bias": "exp_probs_b.bias",
    "router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale",
}  # fmt: skip
# Matrices with a row, or a column, for each number of values; two of them have queries and keys first
OF_VALUES = ("attn_qkv", "ssm_conv1d", "attn_gate", "ssm_beta", "ssm_alpha", "ssm_a", "ssm_dt", "ssm_out")
# Vocabularies whose digits are split before the rest, which llama.cpp does and transformers does not.
SPLITS_DIGITS = ("smollm", "starcoder", "refact", "command-r")


@contextmanager
def as_folder(source: str | Path, gguf_file: str, keep: bool = True, weights: bool = True) -> Iterator[Path]:
    """Yield a folder with the model and, if the file has one, its tokenizer.

    Args:
        source: the file's folder, or a hub id.
        gguf_file: the file's name there.
        keep: keep the folder in the user's cache, or take the one that is there. Otherwise it is
            removed when the block ends; weights that were mapped into memory stay readable.
        weights: otherwise the folder has no weights, but `TENSORS`.

    Raises:
        ModelError: the file is missing, or transformers cannot read it.
        OptionError: a package that reads GGUF files is missing.
    """
    path = _file(source, gguf_file)
    if keep:
        try:
            prepare_folder(_cache())
        except InputError as error:
            log.warning("%s: %s is converted at every load", error, path.name)
            keep = False
    if keep:
        yield kept_folder(path, weights)
        return
    with tempfile.TemporaryDirectory(prefix="eyas-gguf-") as folder:
        _convert(path, Path(folder), weights)
        yield Path(folder)


def kept_folder(path: Path, weights: bool = True) -> Path:
    """Return the folder of this file in the user's cache; it is made first where it is missing or damaged.

    Raises: see `as_folder`.
    """
    from filelock import FileLock

    _check(path.parent, path.name)
    _limit_bytes()  # a wrong number is said before a file is converted
    prepare_folder(_cache())
    folder = _cache() / (_key(path) + ("" if weights else "-0"))
    with write_errors(folder), FileLock(_cache() / f".{folder.name}.lock"):  # a second process waits, and finds it
        if not _is_intact(folder):
            if weights:
                log.info("%s is converted, which takes a while and is done once", path.name)
            _make(path, folder, weights)
        os.utime(folder)
    _remove_unused(folder)
    return folder


def split_gguf(source: str | Path, gguf_file: str | None = None) -> tuple[str | Path, str | None]:
    """Return (folder or hub id, file in GGUF format or None): a path to such a file is split into its folder and its
    name."""
    path = Path(source)
    if gguf_file is None and path.suffix == ".gguf" and path.is_file():
        return path.parent, path.name
    return source, gguf_file


def check_gguf_packages() -> None:
    """Raise OptionError where a package that reads GGUF files is missing."""
    for package in ("gguf", "accelerate"):
        if find_spec(package) is None:
            raise OptionError(f"files in GGUF format need {package}: pip install '.[quantised]' in a clone of eyas")


def _check(source: str | Path, gguf_file: str) -> None:
    """Refuse a file, as `as_folder` says, before anything large is read."""
    folder = Path(source)
    if not folder.is_dir():
        check_path(source, "target")
    elif not (folder / gguf_file).is_file():
        there = ", ".join(sorted(file.name for file in folder.glob("*.gguf"))[:5])
        raise ModelError(
            f"target folder {str(source)!r} has no file {gguf_file!r}; files in GGUF format there: {there or 'none'}"
        )
    check_gguf_packages()


def _read_config(path: Path, header: Header) -> PreTrainedConfig:
    """Return the configuration as transformers reads it, from a copy without the tokenizer: transformers takes seconds to
    minutes for the tokens."""
    with one_line_errors(f"target {str(path.parent)!r} cannot be loaded", path.parent, place=f"{path.name}: "):
        if (own := own_config(header, path)) is not None:
            return own
    with tempfile.TemporaryDirectory(prefix="eyas-gguf-") as folder:
        header.write_settings(Path(folder) / path.name)
        with one_line_errors(f"target {str(path.parent)!r} cannot be loaded", path.parent, place=f"{path.name}: "):
            config: PreTrainedConfig = AutoConfig.from_pretrained(folder, gguf_file=path.name)
    config.name_or_path = str(path.parent)
    embedding = next((tensor for tensor in header.tensors if tensor.name == "token_embd.weight"), None)
    if embedding is not None:
        config.get_text_config().vocab_size = embedding.shape[0]
    for end, setting in WIDTHS.items():
        width = next((value for name, value in header.values.items() if name.endswith(end)), None)
        if width is not None and hasattr(config, setting):
            setattr(config, setting, int(width))
    return config


def _read_tokenizer(path: Path, config: PreTrainedConfig) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer in a file in GGUF format; None, with a logged line, if transformers cannot make
    one from the file."""
    keywords = {"gguf_file": path.name}
    named = (path.parent / "tokenizer_config.json").exists() or getattr(config, "tokenizer_class", None)
    kind = {} if named else {"tokenizer_type": config.model_type}
    try:
        with one_line_errors("", path.parent):
            try:  # with its type known, transformers does not read the configuration again
                tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(path.parent), **keywords, **kind)
            except ValueError:  # no tokenizer stands for this type
                tokenizer = AutoTokenizer.from_pretrained(str(path.parent), **keywords)
            return tokenizer
    except ModelError as error:
        log.info("no tokenizer from %s%s", path.name, error)
        return None


def plain_weights() -> dict[str, Any]:
    """Return keywords of from_pretrained that make plain weights of a file in GGUF format. An older transformers has
    no GgufConfig, and always makes plain weights."""
    settings = getattr(transformers, "GgufConfig", None)
    return {} if settings is None else {"quantization_config": settings(dequantize=True)}


def _file(source: str | Path, gguf_file: str) -> Path:
    """Return the file, fetched where `source` is a hub id. Raise ModelError where there is none."""
    _check(source, gguf_file)
    if Path(source).is_dir():
        return Path(source) / gguf_file
    try:
        return Path(hf_hub_download(str(source), gguf_file))
    except (OSError, ValueError) as error:
        raise ModelError(f"target {str(source)!r} has no file {gguf_file!r} here: {one_line(error, 200)}") from error


def _cache() -> Path:
    return user_cache() / "gguf"


def _key(path: Path) -> str:
    versions = [FORMAT, *(version(name) for name in ("transformers", "gguf"))]
    return "-".join([kept_sha256(path)[:16], *map(str, versions)])


def _is_intact(folder: Path) -> bool:
    """Return whether all files are there as they were written."""
    try:
        expected = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))
        return bool(expected) and all(kept_sha256(folder / name) == known for name, known in expected.items())
    except (OSError, ValueError, AttributeError):
        return False


def _make(path: Path, folder: Path, weights: bool) -> None:
    """Convert into a temporary folder, which then gets its name. Files that a killed process left are removed:
    the maker of a folder holds its lock."""
    for left in (folder, *folder.parent.glob(f".{folder.name}.*.tmp")):
        shutil.rmtree(left, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent))
    try:
        _convert(path, made, weights)
        write_text(made / CHECKSUMS, json.dumps(sha256_of_folder(made), indent=1))
        os.replace(made, folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _limit_bytes() -> float:
    return limit_bytes("EYAS_GGUF_CACHE_GB", 20)


def _remove_unused(newest: Path) -> None:
    folders = (path for path in _cache().iterdir() if path.is_dir() and not path.name.startswith("."))
    remove_unused(folders, newest, _limit_bytes())


def _convert(path: Path, folder: Path, weights: bool) -> None:
    """Write the model and, if there is one, its tokenizer into an empty folder."""
    with one_line_errors(f"target {str(path)!r} cannot be loaded", path.parent):
        header = read_header(path)
    config = _read_config(path, header)
    tokenizer = _read_tokenizer(path, config)
    ends = _ends(header, config.get_text_config().vocab_size, tokenizer)
    eos = {"eos_token_id": ends if len(ends) > 1 else ends[0]} if ends else {}
    if weights:
        keywords = {"config": config, "gguf_file": path.name, **plain_weights()}
        model = read_model(path.parent, torch.float32, keywords=keywords)
        if hasattr(model.config, "quantization_config"):  # the weights are plain ones now
            del model.config.quantization_config
        model.generation_config.update(**eos)  # type: ignore[no-untyped-call]
        model.save_pretrained(folder)
    else:
        write_text(folder / TENSORS, json.dumps(tensors_of(header, config)))
        settings = {"bos_token_id": config.bos_token_id, "pad_token_id": config.pad_token_id, **eos}
        GenerationConfig(**settings).save_pretrained(folder)  # type: ignore[no-untyped-call]
        config.save_pretrained(folder)
    if tokenizer is not None:
        _complete(tokenizer, config, header)
        tokenizer.save_pretrained(folder)


def tensors_of(header: Header, config: Any) -> dict[str, Any]:
    """Return the places of a model's weights in a file, by their names in transformers: [type, shape, offset, order,
    columns, change].

    order: how rows, or `columns`, are sorted (`_order`). []: as in transformers.

    change: how llama.cpp has changed each number, "+1" or "-exp". "": not at all.

    Raises:
        ModelError: transformers has no name for a tensor.
    """
    from gguf import get_tensor_name_map
    from gguf.constants import MODEL_ARCH_NAMES

    arch = header.values[ARCHITECTURE]
    number = next(number for number, name in MODEL_ARCH_NAMES.items() if name == arch)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    known = get_tensor_name_map(number, config.num_hidden_layers)
    names = {}
    for name in model.state_dict():
        stem, _, last = name.rpartition(".")
        if (theirs := known.get_name(stem)) is not None:
            names[f"{theirs}.{last}"] = name
        elif (at := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)) and at[2] in OF_LAYERS:
            names[f"blk.{at[1]}.{OF_LAYERS[at[2]]}"] = name
    found = dict[str, Any]()
    for tensor in header.tensors:
        place = tensor.name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
        adds_one = arch in ADDS_ONE and tensor.name.endswith("norm.weight") and place != "ssm_norm"
        change = "+1" if adds_one else "-exp" if place == "ssm_a" else ""
        order = _order(place, tensor.shape[0], arch, config)
        found[names.get(tensor.name, tensor.name)] = [
            tensor.kind, [*tensor.shape], tensor.offset, order, place == "ssm_out", change,
        ]  # fmt: skip
    return found


def _order(place: str, rows: int, arch: str, config: Any) -> list[int]:
    """Return how llama.cpp has sorted the rows of a tensor, or its columns: [begin, parts, groups, members]. From row
    `begin` on, the file has the first members of all groups, then the second ones, in each of equal parts. transformers has
    each group's members side by side. []: both have one order."""
    counts = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    if arch == "llama" and place in counts:  # pairs of RoPE are side by side
        heads = getattr(config, counts[place])
        return [0, heads, 2, rows // heads // 2]
    if arch not in TILED or place not in OF_VALUES:
        return []
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads  # groups share a head of keys
    begin = 2 * keys * config.linear_key_head_dim if place in OF_VALUES[:2] else 0
    return [begin, 1, keys, values // keys] if keys < values else []


def _ends(header: Header, vocab_size: int, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    """Return the tokens that end a text, a turn or a message in the file; transformers takes the first only. Where the
    file names no end of a turn, it is known by its text, as in llama.cpp, if the chat template writes it."""
    named = {kind: header.values.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")}
    ids = [int(token) for token in named.values() if token is not None]
    if named["eot"] is None and tokenizer is not None:
        written, known = str(tokenizer.chat_template or ""), tokenizer.get_vocab()
        # gpt-oss ends a message with it, and a turn has several
        not_one = "<|end|>" if "<|return|>" in written else ""
        ids += [known[text] for text in ENDS_OF_TURNS if text in written and text in known and text != not_one]
    return list(dict.fromkeys(token for token in ids if 0 <= token < vocab_size))


def _complete(tokenizer: PreTrainedTokenizerBase, config: Any, header: Header) -> None:
    """Add settings that transformers does not take from the file: digits that are split, the length of texts."""
    kind = header.values.get("tokenizer.ggml.pre")
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if kind in SPLITS_DIGITS and isinstance(backend.pre_tokenizer, ByteLevel):
        backend.pre_tokenizer = Sequence([Digits(individual_digits=True), backend.pre_tokenizer])
    if context := getattr(config.get_text_config(), "max_position_embeddings", None):
        tokenizer.model_max_length = context
