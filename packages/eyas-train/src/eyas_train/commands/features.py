"""`eyas features`: the target's features of training data, written to disk once."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.types import PositiveFloat, PositiveInt
from cyclopts.validators import Number

from eyas.cli.tools import (
    FeatureTarget,
    Interrupted,
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
from eyas.errors import EyasError, InputError, OptionError
from eyas.locks import locked_output, prepare_folder
from eyas_lab.folders import check_output_folder
from eyas_train.commands._data import check_files, load_target, read_data

if TYPE_CHECKING:
    from eyas.api import LLM
    from eyas.core.target import Target
    from eyas_train._manifest import Manifest
    from eyas_train.store import FeatureStore

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


def command(*, job: FeatureOptions, model: FeatureTarget, options: TrainMethodOptions) -> None:
    """Write a target's features to disk, to train heads from."""
    from eyas_train.features import write_features
    from eyas_train.store import FeatureStore

    folder = Path(job.output).expanduser()
    devices = model.device.split(",")
    on_ray = job.workers is not None and on_cluster()
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
    check_output_folder(folder, part)
    llm = load_target(model, devices[0])
    store = _plan(llm, folder, job, options, (first, step))
    with locked_output(folder, part):
        todo = [shard for shard in store.missing() if shard % step == first]
        count = min(job.workers or len(devices), max(1, len(todo)))
        with _resumable(store), _progress(store, todo) as bar:
            if count == 1 and not on_ray:
                write_features(store, llm.target, todo, job.batch_tokens, bar.advance)
            else:
                del llm  # each worker loads its own
                _free_memory()
                maker = MakeWriter(model, folder.absolute(), job.batch_tokens)
                made = spread(todo, maker, count, model.device) if on_ray else _divided(store, todo, maker, count)
                for shard in made:
                    bar.advance(store.manifest.shards[shard].tokens)
    _report(store)


def make_features(llm: LLM, job: FeatureOptions, options: dict[str, Any]) -> FeatureStore:
    """Make all features in this process, with a target that is loaded."""
    from eyas_train.features import write_features

    folder = Path(job.output).expanduser()
    store = _plan(llm, folder, job, options, (0, 1))
    with locked_output(folder, part="1-1"), _resumable(store), _progress(store, store.missing()) as bar:
        write_features(store, llm.target, store.missing(), job.batch_tokens, bar.advance)
    _report(store)
    return store


def _resumable(store: FeatureStore) -> AbstractContextManager[None]:
    return interruptible(lambda: f"{store.progress()} are whole in {store.folder}; the same command goes on")


def _free_memory() -> None:
    """Give the target's memory back, on an accelerator too."""
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
    from eyas.hardware import versions
    from eyas.targets.fingerprints import fingerprint, has_fingerprint
    from eyas.text.sources import as_file
    from eyas_train._manifest import MANIFEST_FILE, FeatureSettings, plan_store, tokenizer_identity
    from eyas_train.data import data_hash
    from eyas_train.store import FeatureStore

    need_tokenizer(llm)
    target, (first, step) = llm.target, part
    dtype = str(target.dtype).removeprefix("torch.")
    hashes = [{"name": as_file(path).name, "sha256": data_hash(path)} for path in job.data]
    settings = FeatureSettings(
        target={"name": target.name, "fingerprint": fingerprint(target), "dtype": dtype},
        tokenizer=tokenizer_identity(llm.tokenizer),  # type: ignore[arg-type]
        layers=_layers(target, job, options),
        hidden_size=target.hidden_size,
        dtype=job.store_dtype,
        data={"files": hashes, "sha256": data_hash(job.data)},
        max_length=min(job.max_length, target.context),
        heldout=job.heldout,
        shard_bytes=int(job.shard_mib * 2**20),
    )
    if (folder / MANIFEST_FILE).exists():
        store = FeatureStore(folder)
        if other := store.settings.differences(settings, functools.partial(has_fingerprint, target)):
            raise OptionError(
                f"{folder} was begun with other settings: {'; '.join(other)}; repeat the old ones, or use another folder"
            )
        _agree(store.manifest, folder, job, [i for i in store.missing() if i % step == first])
        return store
    planned = plan_store(settings, read_data(llm, job.data, job.max_length, job.heldout), versions())
    _agree(planned.manifest, folder, job, range(first, len(planned.manifest.shards), step))
    prepare_folder(folder)
    with locked_output(folder, part="plan"):
        if (folder / MANIFEST_FILE).exists():
            raise InputError(f"another process began {folder} meanwhile: run the same command again, it goes on there")
        planned.write(folder)
    return FeatureStore(folder)


def _layers(target: Target, job: FeatureOptions, options: dict[str, Any]) -> tuple[int, ...]:
    """Return the layers of --layers, or the layers that the methods with these options read in training."""
    from eyas import drafters
    from eyas.core.options import build_options, option_defaults
    from eyas_train.features import layers_for_training

    if job.layers:
        try:
            numbers = sorted({int(part) for part in job.layers.split(",")})
        except ValueError:
            raise OptionError(
                f"--layers are whole numbers separated by commas, like 2,8,13,16; got {job.layers!r}"
            ) from None
        if not 0 <= numbers[0] <= numbers[-1] <= target.num_layers:
            raise OptionError(
                f"--layers are from 0 to {target.num_layers}, the output of this target's final norm; got {job.layers!r}"
            )
        return tuple(numbers)
    kinds = [drafters.find(name) for name in job.method.split(",")]
    known = {kind: option_defaults(kind.Options) for kind in kinds}
    unknown = options.keys() - {name for names in known.values() for name in names}  # refused by any method
    chosen = {kind: {n: v for n, v in options.items() if n in names or n in unknown} for kind, names in known.items()}
    return layers_for_training(target, [(kind, build_options(kind.Options, chosen[kind])) for kind in kinds])


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


# --- processes ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class MakeWriter:
    """Loads the target in another process, which sees the folder."""

    model: FeatureTarget
    folder: Path
    batch_tokens: int

    def __call__(self) -> Callable[[Iterable[int]], Iterator[int]]:
        """Return the function that makes shards, and yields the number of each."""
        from eyas_train.features import write_features
        from eyas_train.store import FeatureStore

        llm = load_target(self.model)
        store = FeatureStore(self.folder)
        store.check(llm.target, llm.tokenizer)

        def write(shards: Iterable[int]) -> Iterator[int]:
            for shard in shards:
                if store.fault(shard):  # otherwise a worker that was lost has made it
                    write_features(store, llm.target, [shard], self.batch_tokens, lambda _: _end_without_parent())
                yield shard

        return write


def _divided(store: FeatureStore, todo: Sequence[int], maker: MakeWriter, count: int) -> Iterator[int]:
    """Yield these shards as they are made by processes of this machine. Raise EyasError when one failed; the others end
    their work first."""
    context, devices = multiprocessing.get_context("spawn"), maker.model.device.split(",")
    said, threads = context.SimpleQueue(), max(1, (os.cpu_count() or 1) // count)
    makers = [replace(maker, model=replace(maker.model, device=devices[k % len(devices)])) for k in range(count)]
    processes = [
        context.Process(target=_work, args=(k, makers[k], todo[k::count], threads, said), daemon=True)
        for k in range(count)
    ]
    missing, reasons = list(todo), dict[int, str]()
    try:
        for process in processes:
            process.start()
        running = True
        while running:
            running = any(process.is_alive() for process in processes)
            while not said.empty():
                reasons.update([said.get()])
            for shard in [i for i in missing if not store.fault(i)]:
                missing.remove(shard)
                yield shard
            time.sleep(0.2 * running)
    finally:
        for process in processes:
            process.terminate()
    for k, process in enumerate(processes):
        if code := process.exitcode:
            reason = reasons.get(k) or (f"ended by signal {-code}" if code < 0 else f"ended with status {code}")
            raise EyasError(
                f"worker {k + 1} of {count}: {reason}; {store.progress()} are whole. Run the same command again, it goes on"
            )


def _work(number: int, maker: MakeWriter, shards: Sequence[int], threads: int, said: Any) -> None:
    """Make shards in a process of `_divided`. An interrupt leaves no part of one."""
    import signal

    import torch

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if maker.model.device in ("cpu", "auto") and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads)
    try:
        for _ in maker()(shards):
            pass
    except EyasError as error:
        said.put((number, str(error)))
        sys.exit(2)


def _end_without_parent() -> None:
    """End this process if it is a worker whose parent is gone."""
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        raise Interrupted("the process that began this one is gone")


# --- what is shown ------------------------------------------------------------------------------


def _progress(store: FeatureStore, shards: Sequence[int]) -> AbstractContextManager[Any]:
    return progress_bar("features", sum(store.manifest.shards[i].tokens for i in shards), "tokens")


def _report(store: FeatureStore) -> None:
    gib = sum(shard.bytes for shard in store.manifest.shards) / 2**30
    if store.finish():
        note(f"{store.folder} is complete: {store.progress()}, {store.manifest.tokens:,} tokens, {gib:,.2f} GiB")
    else:
        note(f"this part is done; {store.progress()} are in {store.folder}, the rest is for other parts")


def _verify(store: FeatureStore) -> None:
    with progress_bar("features", sum(shard.bytes for shard in store.manifest.shards), "bytes") as bar:
        problems = store.verify(bar.advance)
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise InputError("; also ".join(problems[:3]) + more)
    store.finish()
    note(f"{store.folder}: {store.progress()} are there, and every checksum is right")
