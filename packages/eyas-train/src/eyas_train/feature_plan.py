"""The plan of a folder of features: which layers of which examples, divided into shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eyas import drafters
from eyas.core.options import build_options, option_defaults
from eyas.core.target import Target
from eyas.errors import InputError, OptionError
from eyas.hardware import versions
from eyas.locks import locked_output, prepare_folder
from eyas.targets.fingerprints import fingerprint
from eyas.text.sources import as_file
from eyas_train.data import Data, data_hash
from eyas_train.features import layers_for_training
from eyas_train.store import MANIFEST_FILE, FeatureSettings, FeatureStore, Manifest, plan_store, tokenizer_identity

__all__ = ["chosen_layers", "feature_settings", "open_or_plan"]


def open_or_plan(
    folder: Path,
    settings: FeatureSettings,
    read: Callable[[], Data],
    is_target: Callable[[str], bool],
    agree: Callable[[Manifest, Sequence[int]], None],
) -> FeatureStore:
    """Return the store in a folder, begun now or earlier with the same settings.

    Args:
        read: reads the data; not called when the folder has a plan.
        is_target: whether a fingerprint belongs to the target.
        agree: called with the plan and the numbers of the missing shards, before anything is
            written; it raises when the user does not want them.

    Raises:
        OptionError: the folder was begun with other settings.
        InputError: the folder is damaged, cannot be written, or was begun by another process
            meanwhile.
    """
    if (folder / MANIFEST_FILE).exists():
        store = FeatureStore(folder)
        other = store.settings.differences(settings, is_target)
        if other:
            raise OptionError(
                f"{folder} was begun with other settings: {'; '.join(other)}; repeat the old ones, or use another folder"
            )
        agree(store.manifest, store.missing())
        return store
    planned = plan_store(settings, read(), versions())
    agree(planned.manifest, range(len(planned.manifest.shards)))
    prepare_folder(folder)
    with locked_output(folder, part="plan"):
        if (folder / MANIFEST_FILE).exists():
            raise InputError(f"another process began {folder} meanwhile: run the same command again, it goes on there")
        planned.write(folder)
    return FeatureStore(folder)


def feature_settings(
    target: Target,
    tokenizer: Any,
    files: Sequence[str],
    layers: tuple[int, ...],
    *,
    dtype: str,
    max_length: int,
    heldout: float,
    shard_bytes: int,
) -> FeatureSettings:
    """Return the settings of features of these files."""
    target_dtype = str(target.dtype).removeprefix("torch.")
    hashes = [{"name": as_file(path).name, "sha256": data_hash(path)} for path in files]
    return FeatureSettings(
        target={"name": target.name, "fingerprint": fingerprint(target), "dtype": target_dtype},
        tokenizer=tokenizer_identity(tokenizer),
        layers=layers,
        hidden_size=target.hidden_size,
        dtype=dtype,
        data={"files": hashes, "sha256": data_hash(files)},
        max_length=min(max_length, target.context),
        heldout=heldout,
        shard_bytes=shard_bytes,
    )


def chosen_layers(
    target: Target, layers: str | None, methods: Sequence[str], options: Mapping[str, Any]
) -> tuple[int, ...]:
    """Return the layers of a list like "2,8,13", or those that the methods with these options read
    in training."""
    if layers:
        try:
            numbers = sorted({int(part) for part in layers.split(",")})
        except ValueError:
            raise OptionError(
                f"--layers are whole numbers separated by commas, like 2,8,13,16; got {layers!r}"
            ) from None
        if not 0 <= numbers[0] <= numbers[-1] <= target.num_layers:
            raise OptionError(
                f"--layers are from 0 to {target.num_layers}, the output of this target's final norm; got {layers!r}"
            )
        return tuple(numbers)
    kinds = [drafters.find(name) for name in methods]
    known = [option_defaults(kind.Options) for kind in kinds]
    unknown = options.keys() - {name for names in known for name in names}  # refused by any method
    chosen = [{name: value for name, value in options.items() if name in names or name in unknown} for names in known]
    built = [(kind, build_options(kind.Options, values)) for kind, values in zip(kinds, chosen, strict=True)]
    return layers_for_training(target, built)
