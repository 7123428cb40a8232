"""Adapters of PEFT (LoRA, DoRA, ...) on the target: one that is always in use, or several that
requests choose from.

    target_with_adapters(model, ...)   -> the target of a model with adapters, or of a PeftModel
    merge(model, folder)               -> the same model with other weights; nothing of PEFT is left in it
    add_adapter_layers(model, folder)  -> the same model with layers of PEFT that add the adapter's part: for quantised weights
    digest(folder)                     -> a hash of the adapter's tensors
    AdapterSet.load(model, folders)    -> layers of PEFT around the model's own; `use` switches the whole model to one of them

The whole model has one adapter at a time. `Target.with_adapter` makes a view of the target, with an
`AdapterView`, for each adapter, and a view switches the model before each of its forwards. A Decoder belongs to one view,
so a batch never mixes adapters, and keys and values that one adapter made are never read by
another.

This module knows no tree, no cache and no drafter. PEFT (the extra `peft`) is imported where it is
used.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from eyas.core.extensions import TargetExtension
from eyas.core.target import Target
from eyas.errors import EyasError, ModelError, OptionError, near, one_line
from eyas.targets.fingerprints import Origin, fingerprint_of
from eyas.targets.pretrained import BASE, REASON_LENGTH, is_missing_path, is_peft_model
from eyas.targets.quantised import library_of

__all__ = [
    "AdapterSet", "AdapterView", "Extension", "adapters_of", "add_adapter_layers", "digest", "merge",
    "target_with_adapters",
]  # fmt: skip

log = logging.getLogger(__name__)  # the command line prints these messages

# Kinds of adapters that compute something outside of the model's layers; the model's own forward
# would leave it out.
UNSUPPORTED_KINDS = (
    "PROMPT_TUNING",
    "MULTITASK_PROMPT_TUNING",
    "P_TUNING",
    "PREFIX_TUNING",
    "CARTRIDGE",
    "ADAPTION_PROMPT",
    "XLORA",
    "POLY",
    "SHADOW",
)


def target_with_adapters(model: Any, name: str, adapters: str | Path | Mapping[str, str | Path] | None) -> Target:
    """Return the target of a PeftModel, or of a model to which adapters are added from their folders."""
    if is_peft_model(model):
        found = AdapterSet(model)
        target = Target(model.get_base_model(), name)
        target.adapters = AdapterView(found, found.active)
        return target
    assert adapters, "a PeftModel, or folders"
    target = Target(model, name)
    base = fingerprint_of(model)
    if isinstance(adapters, Mapping):
        found = AdapterSet.load(model, adapters)
        found.use("")
        target = Target(model, name)
        target.adapters = AdapterView(found, "")
        origin = Origin(base)
    else:
        target = Target((add_adapter_layers if library_of(model) else merge)(model, adapters), name)
        origin = Origin(base, digest(adapters))
    target.extensions += (origin,)
    return target


def adapters_of(given: Any) -> dict[str, str] | str | None:
    """Return adapters as `target_of` takes them: one folder, to be merged; or folders by name, to be switched.

    Accepted are a path, a mapping from names to paths, and a list of paths and of texts "NAME=PATH". A list of
    one path is that path.

    Raises:
        OptionError: something else, a name that is there twice, or the name "base".
    """
    if isinstance(given, str | Path):
        given = [given]
    pairs = list(given.items()) if isinstance(given, Mapping) else [_name_and_path(item) for item in _listed(given)]
    if not pairs:
        return None
    if len(pairs) == 1 and pairs[0][0] is None:
        return str(pairs[0][1])
    found: dict[str, str] = {}
    for name, path in pairs:
        name = Path(path).name if name is None else name
        if not isinstance(path, str | Path) or not isinstance(name, str) or not name or name == BASE or name in found:
            raise OptionError(
                f"adapters have names of their own, other than {BASE!r}: cannot use {name!r} for {path!r}"
            )
        found[name] = str(path)
    return found


def _listed(given: Any) -> Sequence[Any]:
    if not isinstance(given, Sequence) or not all(isinstance(item, str | Path) for item in given):
        raise OptionError(f"an adapter is a folder or a hub id, or a dict of them by name; got {given!r}")
    return given


def _name_and_path(item: str | Path) -> tuple[str | None, str]:
    """Split "name=path" into a pair; a path that exists, or has no such beginning, has no name."""
    name, equals, path = str(item).partition("=")
    return (name, path) if equals and not Path(item).exists() and "/" not in name else (None, str(item))


def merge(model: PreTrainedModel, folder: str | Path) -> PreTrainedModel:
    """Return the model with the adapter's changes added to its weights.

    Raises:
        ModelError: the adapter cannot be loaded, or does not fit the model.
        OptionError: PEFT is not installed.
    """
    tuned = AdapterSet.load(model, {"adapter": folder}).tuned
    with _peft_errors(folder):
        merged: PreTrainedModel = tuned.merge_and_unload(safe_merge=True)
    log.info("adapter %s is merged into the weights", folder)
    return merged


def add_adapter_layers(model: PreTrainedModel, folder: str | Path) -> PreTrainedModel:
    """Return the model with the adapter in layers of its own, always in use. It is not merged, because
    merging into quantised weights would round it.

    Raises:
        ModelError: the adapter cannot be loaded, or does not fit the model.
        OptionError: PEFT is not installed.
    """
    adapters = AdapterSet.load(model, {"adapter": folder})
    adapters.use("adapter")
    log.info("adapter %s is added in layers of its own, as the weights are quantised", folder)
    return model


def digest(folder: str | Path) -> str:
    """Return a hash of the adapter's tensors as they are stored. The target's fingerprint reads only a few matrices,
    so it may miss an adapter's changes."""
    with _peft_errors(folder):
        tensors = _import_peft().load_peft_weights(str(folder), device="cpu")
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        total.update(name.encode() + tensor.detach().double().contiguous().numpy().tobytes())
    return total.hexdigest()[:12]


class AdapterSet:
    """Adapters that are in one model, and which of them is in use.

    Args:
        tuned: a PeftModel. `use` changes its base model, which must not be changed by anyone else
            while eyas decodes with it.
    """

    def __init__(self, tuned: Any, inner: Mapping[str, str] | None = None) -> None:
        """`inner`: the name in PEFT of each adapter; None if adapters have the same names here as
        there."""
        for name, config in tuned.peft_config.items():
            _check_kind(name, config)
        self.tuned = tuned
        self._inner = {name: name for name in tuned.peft_config} if inner is None else dict(inner)
        self._layers: list[Any] = [module for module in tuned.modules() if isinstance(module, _layer_kinds())]
        self._used: tuple[object, ...] = ()  # (adapter, what `_state` was then); others may switch the model meanwhile

    @classmethod
    def load(cls, model: PreTrainedModel, folders: Mapping[str, str | Path]) -> AdapterSet:
        """Put adapters into a model, by name; none of them is in use.

        Args:
            folders: local folder or hub id of each adapter.

        Raises:
            ModelError: an adapter cannot be loaded, or does not fit the model.
            OptionError: PEFT is not installed.
        """
        peft, tuned = _import_peft(), None
        # PEFT accepts no name with a dot, nor one that is a part of "lora_"
        inner = {name: f"adapter{number}" for number, name in enumerate(folders)}
        for name, folder in folders.items():
            with _peft_errors(folder):
                _check_folder(folder)
                config = peft.PeftConfig.from_pretrained(str(folder))
                _check_kind(str(folder), config)
                config.inference_mode = True
                if tuned is None:
                    tuned = peft.get_peft_model(model, config, adapter_name=inner[name])
                read = tuned.load_adapter(str(folder), adapter_name=inner[name])
                _check_keys(folder, read)
        assert tuned is not None, "at least one adapter"
        tuned.eval()
        return cls(tuned, inner)

    @property
    def names(self) -> tuple[str, ...]:
        """The names by which requests choose an adapter."""
        return tuple(self._inner)

    @property
    def active(self) -> str:
        """The active adapter of the PeftModel; "" if none is enabled."""
        disabled = any(layer.disable_adapters for layer in self._layers)
        return "" if disabled else str(self.tuned.active_adapter)

    @property
    def _state(self) -> tuple[object, ...]:
        return tuple((layer.disable_adapters, str(layer.active_adapters)) for layer in self._layers[:1])

    def use(self, name: str) -> None:
        """Switch the model to one adapter; "": to none."""
        if (name, self._state) == self._used:
            return
        self._used = ()  # until the switch is complete
        if name:
            self.tuned.base_model.enable_adapter_layers()
            self.tuned.set_adapter(self._inner[name], inference_mode=True)
        else:
            self.tuned.base_model.disable_adapter_layers()
        self._used = name, self._state

    def check(self, name: str) -> None:
        """Raise OptionError unless there is an adapter of this name; "" is the base model."""
        if name and name not in self.names:
            raise OptionError(f"there is no adapter {name!r}; {near(name, (*self.names, BASE))}")


class AdapterView(NamedTuple):
    """The adapters of a model, and the one that a view of the target uses (`core.target.Adapters`)."""

    adapters: AdapterSet
    used: str

    @property
    def names(self) -> tuple[str, ...]:
        """The names by which requests choose an adapter."""
        return self.adapters.names

    def view(self, name: str) -> AdapterView:
        """Return the same model with another adapter. Raise InputError for an unknown name."""
        self.adapters.check(name)
        return AdapterView(self.adapters, name)

    def switch(self) -> None:
        """Let the model's layers use this adapter."""
        self.adapters.use(self.used)


class Extension(TargetExtension):
    """Layers of PEFT in the model. `weight` of such a layer is the base model's, without the
    adapter."""

    order = 30
    own_forward_only: Mapping[str, str] = {
        "kernels": "the kernels would leave out the adapter that is in its layers: merge it (eyas.load(..., adapter=folder))"
    }

    @classmethod
    def applies(cls, model: PreTrainedModel) -> bool:
        return any(isinstance(module, _layer_kinds()) for module in model.modules())


def _layer_kinds() -> tuple[type, ...]:
    """Return the classes of PEFT's layers; () if PEFT is not imported: no layers of it exist then."""
    layers, others = sys.modules.get("peft.tuners.tuners_utils"), sys.modules.get("peft.utils.other")
    kinds = getattr(layers, "BaseTunerLayer", None), getattr(others, "AuxiliaryTrainingWrapper", None)
    return tuple(kind for kind in kinds if kind is not None)


def _import_peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise OptionError("adapters need peft: pip install '.[peft]' in a clone of eyas") from error
    return peft


def _check_folder(folder: str | Path) -> None:
    path = Path(folder)
    if path.is_dir() and not (path / "adapter_config.json").exists():
        raise ModelError(
            f"adapter folder {str(folder)!r} has no adapter_config.json: pass a folder that PEFT has written"
        )
    if is_missing_path(folder):
        raise ModelError(f"adapter {str(folder)!r} does not exist")


def _check_kind(name: str, config: Any) -> None:
    """Raise ModelError for an adapter that does a part of its work outside of the model's layers."""
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if config.is_prompt_learning or kind in UNSUPPORTED_KINDS or getattr(config, "alora_invocation_tokens", None):
        kind = "aLoRA" if kind == "LORA" else kind
        raise ModelError(
            f"adapter {name!r} is of kind {kind}, which does more than change layers: eyas serves LoRA, DoRA and the like"
        )


def _check_keys(folder: str | Path, read: Any) -> None:
    """Raise ModelError if the model has no place for a tensor of the adapter, or the adapter lacks one."""
    if read.unexpected_keys:
        raise ModelError(
            f"adapter {str(folder)!r} was made for another model: there is no place for {read.unexpected_keys[0]}"
        )
    absent = [key for key in read.missing_keys if "lora_" in key or "modules_to_save" in key]
    if absent:
        raise ModelError(f"adapter {str(folder)!r} lacks tensors: {absent[0]}")


@contextmanager
def _peft_errors(folder: str | Path) -> Iterator[None]:
    """Turn exceptions of PEFT into a ModelError of one line. FutureWarnings that PEFT raises are hidden."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    except (EyasError, MemoryError):
        raise
    except Exception as error:  # a broken file makes PEFT raise exceptions of many kinds
        reason = one_line(error, REASON_LENGTH)
        raise ModelError(f"adapter {str(folder)!r} cannot be loaded: {type(error).__name__}: {reason}") from error
