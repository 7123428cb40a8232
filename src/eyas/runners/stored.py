"""Models whose weights stay in their files, for the CPU kernels.

    checkpoint = open_safetensors(folder)     # plug_target.py opens GGUF files
    model = checkpoint.model()                # a model of transformers, of norms and biases only

A file is mapped into memory. Linear layers and embeddings of the model know the rows of the file that hold their weights
(`kernels.Rows`). The kernels pack these rows, so no weight is ever in memory as float32. The model's own forward works,
too: it reads the rows at each call, which is slow.
"""

from __future__ import annotations

import copy
import json
import math
import mmap
import os
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.initialization import no_init_weights

from eyas.errors import ModelError
from eyas.files import kept_sha256
from eyas.kernels import Rows
from eyas.runners._layer_settings import rotary_name

__all__ = [
    "INDEX", "Checkpoint", "Entry", "MappedFile", "StoredExperts", "StoredKinds", "StoredLinear", "few_outputs", "open_safetensors",
    "settings_of", "shards_of", "stored_in",
]  # fmt: skip

PART = 32 << 20  # bytes of float32 that the own forward makes of a matrix at a time
TYPES = {"F32": 0, "F16": 1, "BF16": 30, "U8": 24}  # of safetensors, by their numbers in GGUF files
MXFP4 = 1039  # MXFP4_PAIRS in kernels/cpu/pack.h: rows whose scales lie apart
FEW = 256  # logits that are computed to learn about a model
INDEX = "model.safetensors.index.json"
# names of an expert's matrices: in files by transformers' classes of today, by Mixtral's, and in GGUF files, which hold the
# matrices of all experts as one tensor
EXPERTS = {"gate": ("gate_proj", "w1"), "up": ("up_proj", "w3"), "down": ("down_proj", "w2")}
# changes of numbers, and what undoes them
UNDO: dict[str, Callable[[Tensor], Tensor]] = {"": lambda x: x, "+1": lambda x: x - 1, "-exp": lambda x: (-x).log()}
WITHIN = ("model.language_model.", "model.")  # a text model's names beside a model of images, and alone
MIXTRAL = ("mlp.", "block_sparse_moe.")  # a module's name in transformers, and in files
HEADER = 8  # bytes of a safetensors file that say how long its header is


class Entry(NamedTuple):
    """Where a tensor lies."""

    file: int
    type: int  # its number in GGUF files
    shape: tuple[int, ...]  # [outputs, inputs], [width] or [experts, outputs, inputs]
    offset: int  # bytes
    order: tuple[int, ...] = ()  # of its rows in GGUF files (`targets.gguf_files`); (): as in transformers
    columns: bool = False  # the order is of these
    change: str = ""  # of its numbers in GGUF files, one of UNDO


class MappedFile:
    """A file in memory, whose pages the system reads when they are used."""

    def __init__(self, path: Path) -> None:
        self.path, self._number = path, os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._number)
        self._map = mmap.mmap(self._number, 0, access=mmap.ACCESS_READ)
        self.bytes = np.frombuffer(self._map, np.uint8)
        self.address = int(self.bytes.ctypes.data)

    @property
    def state(self) -> os.stat_result:
        """The status of the mapped file, even if another file has its name now."""
        return os.fstat(self._number)

    def release(self) -> None:
        """Give back the memory of pages that were read; they are read again if they are used."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


class StoredLinear(nn.Linear):
    """A linear layer whose weight stays in its file.

    Attributes:
        computed: outputs that `forward` computes; the others are zero (`few_outputs`).
    """

    def __init__(self, rows: Rows, bias: Tensor | None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = rows.shape
        self.stored_rows, self.computed = rows, len(rows)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weights [O, I] in float32, made anew."""
        return self.stored_rows.read()

    def forward(self, x: Tensor) -> Tensor:
        """Return the product with rows that are unpacked part by part."""
        y = x.new_zeros(*x.shape[:-1], self.out_features)
        step = max(1, PART // (4 * self.in_features))
        for n in range(0, self.computed, step):
            part = self.stored_rows.take(slice(n, n + step)).read()
            y[..., n : n + len(part)] = F.linear(x, part)
        return y if self.bias is None else y + self.bias


class StoredKinds(nn.Module):
    """Linear layers that are one in the model.

    Attributes:
        place_O: where each output is among theirs.
    """

    def __init__(self, parts: Sequence[StoredLinear], place_O: Tensor) -> None:
        super().__init__()
        self.parts, self.place_O = nn.ModuleList(parts), place_O

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs in the model's order."""
        return torch.cat([part(x) for part in self.parts], -1)[..., self.place_O]


class StoredEmbedding(nn.Embedding):
    """An embedding whose table stays in its file.

    Attributes:
        scale: the factor of its output, as Gemma's embeddings have it.
    """

    def __init__(self, rows: Rows, padding_idx: int | None, scale: float = 1.0) -> None:
        nn.Module.__init__(self)
        self.scale = scale
        self.num_embeddings, self.embedding_dim = rows.shape
        self.stored_rows, self.padding_idx = rows, padding_idx

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The table [V, D] in float32, made anew."""
        return self.stored_rows.read()

    def forward(self, input: Tensor) -> Tensor:
        """Return the embeddings of ids, unpacking their rows alone."""
        rows = self.stored_rows.take(input.flatten()).read().view(*input.shape, self.embedding_dim)
        return rows if self.scale == 1.0 else rows * self.scale

    def extra_repr(self) -> str:
        """Return the sizes, as torch prints them."""
        return f"{self.num_embeddings}, {self.embedding_dim}"


class StoredExperts(nn.Module):
    """The experts of a layer, whose weights stay in their files.

    Attributes:
        own: the module of transformers, whose biases stay, if it has any.
        gates, ups, downs: the rows of each expert.
        computed: whether `forward` computes them; else it returns zeros (`few_outputs`).
    """

    def __init__(self, own: Any, gates: Sequence[Rows], ups: Sequence[Rows], downs: Sequence[Rows]) -> None:
        super().__init__()
        self.computed = True
        self.gates, self.ups, self.downs = gates, ups, downs
        if not hasattr(own, "limit"):
            self.act_fn: Any = own.act_fn
            return
        self.alpha = own.alpha
        self.limit = own.limit
        self.gate_up_proj_bias = own.gate_up_proj_bias
        self.down_proj_bias = own.down_proj_bias

    def forward(self, x_MD: Tensor, chosen_Mk: Tensor, weight_Mk: Tensor) -> Tensor:
        """Return the weighted sums [M, D] of the chosen experts' outputs."""
        total_MD = torch.zeros_like(x_MD)
        for e in torch.unique(chosen_Mk).tolist() if self.computed else ():
            m, place = torch.where(chosen_Mk == e)
            first, second = (F.linear(x_MD[m], rows[e].read()) for rows in (self.gates, self.ups))
            if hasattr(self, "limit"):
                output = F.linear(self._clamped(first, second, e), self.downs[e].read(), self.down_proj_bias[e])
            else:
                output = F.linear(self.act_fn(first) * second, self.downs[e].read())
            total_MD.index_add_(0, m, output * weight_Mk[m, place, None])
        return total_MD

    def _clamped(self, gate_MI: Tensor, up_MI: Tensor, e: int) -> Tensor:
        """Return gated inner units as gpt-oss has them."""
        bias_I2 = self.gate_up_proj_bias[e].view(-1, 2)
        gate_MI = (gate_MI + bias_I2[:, 0]).clamp(max=self.limit)
        up_MI = (up_MI + bias_I2[:, 1]).clamp(-self.limit, self.limit)
        return (up_MI + 1) * gate_MI * torch.sigmoid(self.alpha * gate_MI)


@dataclass(frozen=True)
class Checkpoint:
    """The files of a model.

    Attributes:
        config: the model's configuration.
        generation: the settings in generation_config.json; None where there is none.
        tensors: by their names in transformers.
        frequency_factors: numbers that divide the frequencies of RoPE; None: they stay.
    """

    config: Any
    generation: GenerationConfig | None
    files: Sequence[MappedFile]
    tensors: Mapping[str, Entry]
    frequency_factors: Tensor | None = None

    @property
    def digests(self) -> list[str]:
        """The SHA-256 of each file."""
        return [kept_sha256(file.path) for file in self.files]

    def state(self) -> tuple[tuple[int, int], ...]:
        """Return a key that changes when somebody writes into a file: sizes and times of the last change."""
        return tuple((file.state.st_size, file.state.st_mtime_ns) for file in self.files)

    def rows(self, name: str, shape: Sequence[int]) -> Rows:
        """Return the rows of a matrix. Raise ModelError if there is none of this name and shape."""
        entry = self._entry(name, shape)
        outputs, inputs = shape
        rows = Rows.at(self.files[entry.file].address + entry.offset, entry.type, outputs, inputs, self)
        if not entry.order:
            return rows
        place = _places(inputs if entry.columns else outputs, entry.order)
        return replace(rows, column_I=place) if entry.columns else rows.take(place)

    def tensor(self, name: str, shape: Sequence[int]) -> Tensor:
        """Return a tensor of any shape in float32. Raise ModelError if there is none of this name and shape."""
        entry = self._entry(name, shape)
        rows = Rows.at(self.files[entry.file].address + entry.offset, entry.type, 1, math.prod(shape), self)
        x = UNDO[entry.change](rows.read().view(*shape))
        return x[_places(len(x), entry.order)] if entry.order else x

    def release(self) -> None:
        """Give back the memory of the pages that were read."""
        for file in self.files:
            file.release()

    def model(self, layers: int | None = None) -> Any:
        """Return the model in eval mode; with `layers`, of its first ones only. Raise ModelError if tensors are
        missing or have other shapes."""
        config = copy.deepcopy(self.config)
        vars(config).pop("quantization_config", None)  # of experts, which are read here
        if layers is not None:
            if getattr(config, "num_kv_shared_layers", 0):  # the last ones
                config.num_kv_shared_layers = max(0, config.num_kv_shared_layers + layers - config.num_hidden_layers)
            config.num_hidden_layers = layers
            if getattr(config, "layer_types", None):
                config.layer_types = config.layer_types[:layers]
        with torch.device("meta"), no_init_weights():
            model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
        base = model.get_decoder()
        rotary = type(getattr(base, rotary_name(base)))(config=config)
        setattr(base, rotary_name(base), rotary)
        if self.frequency_factors is not None:
            rotary.inv_freq /= self.frequency_factors
        for name, module in list(model.named_modules()):
            for child_name, child in list(module.named_children()):
                self._store(module, child_name, f"{name}.{child_name}".lstrip("."), child, config)
        for name, empty in model.state_dict(keep_vars=True).items():
            if empty.is_meta:
                owner, _, last = name.rpartition(".")
                value = self.tensor(name, empty.shape)
                if isinstance(empty, nn.Parameter):
                    value = nn.Parameter(value, requires_grad=False)
                setattr(model.get_submodule(owner), last, value)
        if self.generation is not None:
            model.generation_config = copy.deepcopy(self.generation)
        model.eyas_checkpoint, model.eyas_state = self, self.state  # the latter for `targets.loading.version_of`
        return model.eval()

    def _store(self, parent: nn.Module, place: str, name: str, module: Any, config: Any) -> None:
        """Replace a linear layer, an embedding or experts by one whose weight stays in the file."""
        if place == "experts" and hasattr(module, "gate_up_proj"):
            setattr(parent, place, StoredExperts(module, *self._experts(name, module)))
        if not isinstance(module, nn.Linear | nn.Embedding):
            return
        key = f"{name}.weight"
        if config.tie_word_embeddings and key not in self.tensors and place == "lm_head":
            key = "model.embed_tokens.weight"
        if place == "in_proj_qkvz" and key not in self.tensors:
            setattr(parent, place, self._by_kinds(name, parent))
            return
        has_parts = place in ("embed_tokens_per_layer", "per_layer_model_projection")  # one for each layer, in Gemma 4
        rows = (self._per_layer if has_parts else self.rows)(key, module.weight.shape)
        if isinstance(module, nn.Embedding):
            setattr(
                parent, place, StoredEmbedding(rows, module.padding_idx, getattr(module, "scalar_embed_scale", 1.0))
            )
        else:
            bias = None if module.bias is None else self.tensor(f"{name}.bias", module.bias.shape)
            setattr(parent, place, StoredLinear(rows, bias))

    def _per_layer(self, name: str, shape: Sequence[int]) -> Rows:
        """Return the rows of a matrix with outputs or inputs for each layer. The model may have fewer layers than the file."""
        outputs, inputs = shape
        rows = self.rows(name, self.tensors[name].shape if name in self.tensors else shape).take(slice(0, outputs))
        return replace(rows, inputs=inputs)

    def _by_kinds(self, name: str, module: Any) -> StoredKinds:
        """Return a projection that GGUF files have as two, sorted by kinds and not by heads of keys."""
        keys, values, D = module.key_dim, module.value_dim, module.hidden_size
        shapes = {"attn_qkv.weight": (2 * keys + values, D), "attn_gate.weight": (values, D)}
        parts = [StoredLinear(self.rows(_in_gguf(name, kind), shape), None) for kind, shape in shapes.items()]
        kinds = torch.split(torch.arange(2 * (keys + values), device="cpu"), [keys, keys, values, values])
        return StoredKinds(parts, torch.cat([kind.view(module.num_k_heads, -1) for kind in kinds], 1).flatten())

    def _experts(self, name: str, module: Any) -> list[list[Rows]]:
        """Return the rows of each expert: gates, ups and downs. Read the biases that GGUF files have in parts."""
        is_gpt_oss, down = hasattr(module, "limit"), module.down_proj
        count, D, inner = (down.mT if is_gpt_oss else down).shape
        if is_gpt_oss and f"{name}.down_proj_blocks" in self.tensors:
            both = self._mxfp4(f"{name}.gate_up_proj", (count, 2 * inner, D))
            gates = [rows.take(slice(0, None, 2)) for rows in both]
            ups = [rows.take(slice(1, None, 2)) for rows in both]
            return [gates, ups, self._mxfp4(f"{name}.down_proj", (count, D, inner))]
        shapes = {"gate": (inner, D), "up": (inner, D), "down": (D, inner)}
        if is_gpt_oss:
            gate, up, bias_ED = (
                self.tensor(_in_gguf(name, f"ffn_{kind}_exps.bias"), (count, outputs))
                for kind, (outputs, _) in shapes.items()
            )
            bias_EI2 = torch.stack((gate, up), 2)
            module.gate_up_proj_bias = nn.Parameter(bias_EI2.flatten(1), requires_grad=False)
            module.down_proj_bias = nn.Parameter(bias_ED, requires_grad=False)
        return [self._expert_rows(name, kind, (count, *shape)) for kind, shape in shapes.items()]

    def _expert_rows(self, name: str, kind: str, shape: tuple[int, int, int]) -> list[Rows]:
        """Return the rows of each expert's matrix of this kind."""
        count, outputs, inputs = shape
        today, mixtral = EXPERTS[kind]
        for all_experts, parts, part in ((f"ffn_{kind}_exps", 1, 0), ("ffn_gate_up_exps", 2, int(kind == "up"))):
            if (whole := _in_gguf(name, f"{all_experts}.weight")) in self.tensors:
                begin = self._begin(whole, (count, parts * outputs, inputs))
                rows = Rows.at(begin, self.tensors[whole].type, count * parts * outputs, inputs, self)
                return _split(rows, outputs)[part::parts]
        stem = today if f"{name}.0.{today}.weight" in self.tensors else mixtral
        return [self.rows(f"{name}.{e}.{stem}.weight", (outputs, inputs)) for e in range(count)]

    def _mxfp4(self, name: str, shape: tuple[int, int, int]) -> list[Rows]:
        """Return the rows of each expert's matrix, whose nibbles and scales are two tensors."""
        count, outputs, inputs = shape
        groups = inputs // 32  # of weights that share a scale
        nibbles = self._begin(f"{name}_blocks", (count, outputs, groups, 16))
        scales = self._begin(f"{name}_scales", (count, outputs, groups))
        row = torch.arange(count * outputs)
        pairs = torch.stack((nibbles + 16 * groups * row, scales + groups * row), 1)
        rows = Rows(MXFP4, pairs.data_ptr() + 16 * row, inputs, (pairs, self))
        return _split(rows, outputs)

    def _begin(self, name: str, shape: Sequence[int]) -> int:
        """Return the address of a tensor."""
        entry = self._entry(name, shape)
        return self.files[entry.file].address + entry.offset

    def _entry(self, name: str, shape: Sequence[int]) -> Entry:
        entry = self.tensors.get(name) or self.tensors.get(name.replace(*MIXTRAL))
        if entry is None:
            raise ModelError(f"{self.files[0].path} lacks the tensor {name}")
        if [n for n in entry.shape if n != 1] != [n for n in shape if n != 1]:  # GGUF files lack sizes of 1
            raise ModelError(f"{self.files[0].path}: {name} is {list(entry.shape)} instead of {list(shape)}")
        return entry


def _in_gguf(name: str, kind: str) -> str:
    """Return the name of a tensor of this kind in GGUF files, for a module of a layer."""
    at = re.search(r"layers\.(\d+)\.", name)
    return "" if at is None else f"blk.{at[1]}.{kind}"


def _split(rows: Rows, outputs: int) -> list[Rows]:
    """Return the rows of each of several matrices with so many outputs."""
    return [rows.take(slice(n, n + outputs)) for n in range(0, len(rows), outputs)]


def _places(count: int, order: Sequence[int]) -> Tensor:
    """Return where the rows, or columns, that transformers has one after the other lie in a GGUF file."""
    begin, parts, groups, members = order
    place = torch.arange(count, device="cpu")
    place[begin:] = place[begin:].view(parts, members, groups, -1).transpose(1, 2).flatten()
    return place


def stored_in(model: Any) -> Checkpoint | None:
    """Return the files in which a model's weights are; None for a model that holds its weights."""
    return getattr(model, "eyas_checkpoint", None)


@contextmanager
def few_outputs(model: Any) -> Iterator[None]:
    """Within this context, a forward of a stored model skips the matrices of its layers and computes a few logits. Its
    results have the right sizes, and little is read."""
    layers = {id(module) for module in model.get_decoder().modules()}
    linears = [module for module in model.modules() if isinstance(module, StoredLinear)]
    experts = [module for module in model.modules() if isinstance(module, StoredExperts)]
    for module in linears:
        module.computed = 0 if id(module) in layers else min(FEW, module.out_features)
    for one in experts:
        one.computed = False
    try:
        yield
    finally:
        for module in linears:
            module.computed = module.out_features
        for one in experts:
            one.computed = True


def open_safetensors(folder: Path) -> Checkpoint | None:
    """Return the checkpoint of a folder in Hugging Face layout; None where it has other files or types of tensors."""
    names = shards_of(folder / INDEX)
    if not all((folder / name).is_file() for name in names):
        return None
    files, tensors = [MappedFile(folder / name) for name in names], dict[str, Entry]()
    for number, file in enumerate(files):
        length = int.from_bytes(file.bytes[:HEADER].tobytes(), "little")
        header = json.loads(file.bytes[HEADER : HEADER + length].tobytes())
        for name, about in header.items():
            if name == "__metadata__":
                continue
            if about["dtype"] not in TYPES:
                return None
            begin, end = about["data_offsets"]
            entry = Entry(number, TYPES[about["dtype"]], tuple(about["shape"]), HEADER + length + begin)
            tensors |= _of_each_expert(name.replace(*WITHIN), entry, end - begin)
    return Checkpoint(*settings_of(folder), files, tensors)


def _of_each_expert(name: str, entry: Entry, size: int) -> dict[str, Entry]:
    """Return the matrices of a tensor of `size` bytes that holds all experts; any other tensor as it is."""
    stem, _, last = name.rpartition(".")
    kinds = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(last, ())
    if not stem.endswith(".experts") or not kinds:
        return {name: entry}
    count, outputs, inputs = entry.shape
    parts = [f"{stem}.{e}.{kind}.weight" for e in range(count) for kind in kinds]
    one = entry._replace(shape=(outputs // len(kinds), inputs))
    return {part: one._replace(offset=entry.offset + n * (size // len(parts))) for n, part in enumerate(parts)}


def shards_of(index: Path) -> list[str]:
    """Return the names of the files that an index lists, or of the only one where there is no index."""
    if not index.is_file():
        return ["model.safetensors"]
    return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))


def settings_of(folder: Path) -> tuple[Any, GenerationConfig | None]:
    """Return the configuration of a model and, if there are any, its settings for generation."""
    has_settings = (folder / "generation_config.json").is_file()
    config = AutoConfig.from_pretrained(folder).get_text_config(decoder=True)
    return config, GenerationConfig.from_pretrained(folder) if has_settings else None
