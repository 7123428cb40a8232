"""`eyas features`: the target's features of training data, written to disk once."""

from __future__ import annotations

import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.types import PositiveFloat, PositiveInt
from cyclopts.validators import Number

from eyas.cli.tools import (
    Interrupted,
    ProgressBar,
    TrainMethodOptions,
    UsageError,
    interruptible,
    need_tokenizer,
    note,
    on_cluster,
    option_group,
    progress_bar,
    spread,
)
from eyas.errors import InputError, OptionError
from eyas.locks import locked_output
from eyas_lab.folders import check_output_folder
from eyas_train.commands._data import check_files, read_data
from eyas_train.commands._targets import FeatureTarget, load_target

if TYPE_CHECKING:
    from eyas.api import LLM
    from eyas_train.store import FeatureStore, Manifest

GROUP = "Heads"
LARGE_GIB = 10.0
EXAMPLES = """
eyas features --target MODEL --data chat.jsonl --output FEATURES  # for eagle3, and so for eagle1 and eagle2
eyas train --target MODEL --features FEATURES --output HEAD  # instead of --data
eyas features ... --device cuda:0,cuda:1  # a process for each device
RAY_ADDRESS=auto eyas features ... --workers 8  # on the cluster that this machine belongs to
eyas features ... --part 1/4  # on the first of four machines that share a folder, or whose folders are put together
eyas features --output FEATURES --verify  # compare every checksum
"""
NOTES = ("After an interruption whole shards stay and can be trained from; the same command makes the rest.",)
AT_LEAST_3 = Parameter(validator=Number(gte=3))
HIDDEN = Parameter(show=False)


@option_group
class FeatureOptions:
    """The data that features are made from, and the folder that they are written to."""

    data: Annotated[tuple[str, ...], "Data", "FILE"] = ()
    """Chats (JSONL, Parquet) or plain text, .gz too, here or at a URL; several files are mixed."""
    output: Annotated[str, "Data", "FOLDER"]
    """Folder for the features."""
    method: Annotated[str, "Data", "NAME,..."] = "eagle3"
    """Methods to train later. Their layers are written."""
    layers: Annotated[str | None, "Data", "K,..."] = None
    """Write these layers instead: hidden_states[k]. The number of layers stands for the state after the final
    norm."""
    max_length: Annotated[int, "Data", AT_LEAST_3] = 2048
    """Longest example in tokens."""
    heldout: Annotated[float, "Data", Parameter(validator=Number(gte=0, lt=1))] = 0.05
    """Share of the lines to hold out."""
    store_dtype: Annotated[Literal["bfloat16", "float16", "float32", "float8_e4m3fn"], "Output"] = "bfloat16"
    """The type of features on disk; float8_e4m3fn, with a scale for each token and layer, takes half of the bytes."""
    shard_mib: Annotated[PositiveFloat, "Output"] = 512.0
    """Size of a file, and of the memory for it."""
    yes: Annotated[bool, "Output"] = False
    """Do not ask before large outputs. Otherwise asks above 10 GiB."""
    verify: Annotated[bool, "Output"] = False
    """Only compare the checksums of the files in --output."""
    batch_tokens: Annotated[int, "Machine", AT_LEAST_3] = 8192
    """Tokens that the target reads at a time, padding included."""
    workers: Annotated[PositiveInt | None, "Machine", "N"] = None
    """Processes, each with its own target, on this machine or on the Ray cluster of RAY_ADDRESS
    (docs/guide/scale.md). Default: one per device."""
    part: Annotated[str, "Machine", "K/N"] = "1/1"
    """Make every N-th shard only, from the K-th on."""
    only: Annotated[str | None, HIDDEN] = None
    """Shards of a worker process."""
    of: Annotated[int | None, HIDDEN] = None
    """The process that began this worker."""


def command(
    *,
    job: FeatureOptions,
    model: FeatureTarget,
    options: TrainMethodOptions,
    arguments: Annotated[tuple[str, ...], Parameter(parse=False)] = (),
) -> None:
    """Write a target's features to disk, to train heads from."""
    from eyas_train.store import FeatureStore
    from eyas_train.workers import Workers

    folder = Path(job.output).expanduser()
    devices = model.device.split(",")
    on_ray = job.workers is not None and not job.only and on_cluster()
    if on_ray and len(devices) > 1:
        raise UsageError("on a cluster --workers says how many processes there are: pass one --device, or none")
    if job.verify:
        _verify(FeatureStore(folder))
        return
    if not job.data:
        raise UsageError("option --data is missing")
    check_files(job.data)
    first, step = _part(job.part)
    part = f"{first + 1}-{step}"
    if not job.only:  # workers begin at once: their locks would refuse each other
        check_output_folder(folder, part)
    llm = load_target(model, devices[0])
    store = FeatureStore(folder) if job.only else _plan(llm, folder, job, options, (first, step))
    with nullcontext() if job.only else locked_output(folder, part):
        shards = [int(i) for i in job.only.split(",")] if job.only else range(first, len(store.manifest.shards), step)
        todo = sorted(set(store.missing()) & set(shards))
        count = min(job.workers or len(devices), max(1, len(todo)))
        with _resumable(store):
            if on_ray:
                del llm
                _free_memory()
                with _progress(store, todo) as bar:
                    for shard in spread(
                        todo, MakeWriter(model, folder.absolute(), job.batch_tokens), count, model.device
                    ):
                        bar.advance(store.manifest.shards[shard].tokens)
            elif count == 1:
                _make(llm, store, todo, job)
            else:
                del llm  # each worker loads its own
                _free_memory()
                with tempfile.TemporaryDirectory() as notes, _progress(store, todo) as bar:
                    Workers(store, todo, count, devices, arguments, Path(notes)).run(bar.advance)
        if not job.only:
            _report(store)


def make_features(llm: LLM, job: FeatureOptions, options: dict[str, Any]) -> FeatureStore:
    """Make all features in this process, with a target that is loaded."""
    folder = Path(job.output).expanduser()
    store = _plan(llm, folder, job, options, (0, 1))
    with locked_output(folder, part="1-1"), _resumable(store):
        _make(llm, store, store.missing(), job)
    _report(store)
    return store


def _resumable(store: FeatureStore) -> AbstractContextManager[None]:
    return interruptible(lambda: f"{store.progress()} are whole in {store.folder}; the same command goes on")


def _free_memory() -> None:
    """Give the target's memory back, on an accelerator too."""
    import gc

    import torch

    gc.collect()  # its modules point at each other
    torch.cuda.empty_cache()


def _part(text: str) -> tuple[int, int]:
    """Return (first shard, step)."""
    k, slash, n = text.partition("/")
    if not (slash and k.isdecimal() and n.isdecimal() and 1 <= int(k) <= int(n)):
        raise OptionError(f"--part is like 2/4, the second of four parts; got {text!r}")
    return int(k) - 1, int(n)


# --- the plan -----------------------------------------------------------------------------------


def _plan(llm: LLM, folder: Path, job: FeatureOptions, options: dict[str, Any], part: tuple[int, int]) -> FeatureStore:
    """Return the store to be filled: begun here, or one that this command began earlier. Tells how
    much space it takes, and asks."""
    from eyas.targets.fingerprints import has_fingerprint
    from eyas_train.feature_plan import chosen_layers, feature_settings, open_or_plan

    need_tokenizer(llm)
    settings = feature_settings(
        llm.target,
        llm.tokenizer,
        job.data,
        chosen_layers(llm.target, job.layers, job.method.split(","), options),
        dtype=job.store_dtype,
        max_length=job.max_length,
        heldout=job.heldout,
        shard_bytes=int(job.shard_mib * 2**20),
    )
    first, step = part

    def agree(manifest: Manifest, missing: Sequence[int]) -> None:
        _agree(manifest, folder, job, [i for i in missing if i % step == first])

    data = functools.partial(read_data, llm, job.data, job.max_length, job.heldout)
    return open_or_plan(folder, settings, data, functools.partial(has_fingerprint, llm.target), agree)


def _agree(manifest: Manifest, folder: Path, job: FeatureOptions, shards: Sequence[int]) -> None:
    """Tell how much space these shards take. Ask when it is a lot, and refuse shards that do not fit."""
    if not shards:
        return
    settings = manifest.settings
    gib = sum(manifest.shards[i].bytes for i in shards) / 2**30
    existing = next(path for path in [folder, *folder.absolute().parents] if path.exists())
    free = shutil.disk_usage(existing).free / 2**30
    of_all = "" if len(shards) == len(manifest.shards) else f" of {len(manifest.shards):,}"
    note(
        f"{manifest.train + manifest.heldout:,} examples, {manifest.tokens:,} tokens, "
        f"layers {','.join(map(str, settings.layers))} of {settings.hidden_size:,} numbers in {settings.dtype}; "
        f"to be made: {len(shards):,}{of_all} shards, {gib:,.2f} GiB; free there: {free:,.1f} GiB"
    )
    if gib > free:
        raise InputError(
            f"{gib:,.2f} GiB does not fit into the {free:,.2f} GiB that are free for {folder}: take less data or fewer layers"
        )
    if gib <= LARGE_GIB or job.yes:
        return
    if not _on_terminal():
        raise InputError(f"{gib:,.1f} GiB is a lot: give --yes if that is intended")
    print(f"Write {gib:,.1f} GiB into {folder}? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise Interrupted("nothing was written")


def _on_terminal() -> bool:
    return sys.stdin.isatty()


# --- the work -----------------------------------------------------------------------------------


def _make(llm: LLM, store: FeatureStore, todo: Sequence[int], job: FeatureOptions) -> None:
    """Make these shards in this process."""
    from eyas_train.features import write_features

    with _progress(store, todo, hidden=bool(job.only)) as bar:

        def on_batch(tokens: int) -> None:
            bar.advance(tokens)
            if job.of not in (None, os.getppid()):
                raise Interrupted("the process that began this one is gone")

        write_features(store, llm.target, todo, job.batch_tokens, on_batch)


@dataclass(frozen=True)
class MakeWriter:
    """Loads the target in a worker of Ray's, which sees the folder."""

    model: FeatureTarget
    folder: Path
    batch_tokens: int

    def __call__(self) -> Callable[[Sequence[int]], Iterator[int]]:
        """Return the function that makes shards, and yields the number of each."""
        from eyas_train.features import write_features
        from eyas_train.store import FeatureStore

        llm = load_target(self.model)
        store = FeatureStore(self.folder)
        store.check(llm.target, llm.tokenizer)

        def write(shards: Sequence[int]) -> Iterator[int]:
            for shard in shards:
                if store.fault(shard):  # otherwise a worker that was lost has made it
                    write_features(store, llm.target, [shard], self.batch_tokens)
                yield shard

        return write


def _progress(store: FeatureStore, shards: Sequence[int], hidden: bool = False) -> AbstractContextManager[ProgressBar]:
    tokens = sum(store.manifest.shards[i].tokens for i in shards)
    return progress_bar("features", tokens, "tokens", hidden)


def _report(store: FeatureStore) -> None:
    gib = sum(shard.bytes for shard in store.manifest.shards) / 2**30
    if store.finish():
        note(f"{store.folder} is complete: {store.progress()}, {store.manifest.tokens:,} tokens, {gib:,.2f} GiB")
    else:
        note(f"this part is done; {store.progress()} are in {store.folder}, the rest is for other parts")


def _verify(store: FeatureStore) -> None:
    total = sum(shard.bytes for shard in store.manifest.shards)
    with progress_bar("features", total, "bytes") as bar:
        problems = store.verify(bar.advance)
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise InputError("; also ".join(problems[:3]) + more)
    store.finish()
    note(f"{store.folder}: {store.progress()} are there, and every checksum is right")
