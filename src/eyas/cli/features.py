"""`eyas features`: what the frozen target sees of training data, written to disk once. Run again, the same command goes on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from eyas.cli._data import read_data
from eyas.cli._errors import Interrupted, note
from eyas.cli._load import ITSELF, check_exact, load
from eyas.cli._options import MODEL_BASE, MethodCommand, examples, method_options, option, stack
from eyas.errors import EyasError, InputError, OptionError

if TYPE_CHECKING:
    from eyas.api import LLM
    from eyas.train.store import FeatureSettings, FeatureStore, Manifest

__all__ = ["command"]

LARGE_GIB = 10.0
CALLED = "eyas.cli.features.called"
EXAMPLES = examples(
    ("eyas features --target MODEL --data chat.jsonl --output FEATURES", "for eagle3, and so for eagle1 and eagle2"),
    ("eyas train --target MODEL --features FEATURES --output HEAD", "instead of --data"),
    ("eyas features ... --device cuda:0,cuda:1", "a process for each device"),
    ("eyas features ... --part 1/4", "on the first of four machines that share a folder, or whose folders are put together"),
    ("eyas features --output FEATURES --verify", "compare every checksum"),
    more=("Whatever ends it, whole shards stay and can be trained from; the same command makes the rest.",),
)


class _FeaturesCommand(MethodCommand):
    """Remembers how it was called, for its workers."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[CALLED] = list(args)
        return super().parse_args(ctx, args)


@click.command("features", cls=_FeaturesCommand, without=(), epilog=EXAMPLES, panel="Heads")
@stack(
    option("Data", "--data", multiple=True, metavar="FILE", help="Chats (JSONL) or plain text, .gz too; several are mixed."),
    option("Data", "--output", required=True, metavar="FOLDER", help="Where the features go."),
    option("Data", "--method", default="eagle3", metavar="NAME,...", help="Methods to be trained: the layers that they read are written."),
    option("Data", "--layers", metavar="K,...", help="These layers instead: hidden_states[k]; the number of layers: after the final norm."),
    option("Data", "--max-length", type=click.IntRange(min=3), default=2048, help="Tokens of an example."),
    option("Data", "--heldout", type=click.FloatRange(0, 1, max_open=True), default=0.05, help="Share of the lines kept apart."),
    option(
        "Output", "--store-dtype", type=click.Choice(["bfloat16", "float16", "float32"]), default="bfloat16", help="Of features on disk."
    ),
    option("Output", "--shard-mib", type=click.FloatRange(min=0, min_open=True), default=512.0, help="Size of a file; also of the memory."),
    option("Output", "--yes", is_flag=True, help=f"Do not ask, whatever the size. Otherwise asks above {LARGE_GIB:.0f} GiB."),
    option("Output", "--verify", is_flag=True, help="Only compare the checksums of what is in --output."),
    option("Machine", "--batch-tokens", type=click.IntRange(min=3), default=8192, help="Tokens the target reads at a time, with padding."),
    option("Machine", "--workers", type=click.IntRange(min=1), metavar="N", help="Processes, each with the target. Default: one a device."),
    option("Machine", "--part", default="1/1", metavar="K/N", help="Make every N-th shard only, from the K-th on."),
    option("Machine", "--only", hidden=True, metavar="I,...", help="Shards of a worker."),
    option("Machine", "--of", type=int, hidden=True, metavar="PID", help="The process that began this worker."),
    MODEL_BASE,
)
@click.pass_context
def command(ctx: click.RichContext, /, **given: Any) -> int:
    """Write a target's features to disk, to train heads from."""
    from eyas.train.store import FeatureStore

    folder = Path(given["output"]).expanduser()
    if given["verify"]:
        return _verify(FeatureStore(folder))
    if not given["data"]:
        raise click.UsageError("Missing option '--data'", ctx)
    check_exact(given)
    first, step = _part(given["part"])
    devices = given["device"].split(",")
    llm = load({**given, **ITSELF, "device": devices[0]}, {})
    store = FeatureStore(folder) if given["only"] else _planned(llm, folder, given, method_options(ctx), (first, step))
    mine = [int(i) for i in given["only"].split(",")] if given["only"] else range(first, len(store.manifest.shards), step)
    todo = sorted(set(store.missing()) & set(mine))
    workers = min(given["workers"] or len(devices), max(1, len(todo)))
    try:
        if workers == 1:
            _work(llm, store, todo, given)
        else:
            del llm  # each worker loads its own
            _give_back()
            with tempfile.TemporaryDirectory() as notes:
                _Workers(store, todo, workers, devices, ctx.meta[CALLED], Path(notes)).run()
    except KeyboardInterrupt:
        raise Interrupted(f"{_count(store)} are whole in {folder}; the same command goes on") from None
    if not given["only"]:
        _say(store)
    return 0


def _give_back() -> None:
    """What a target took is free again, on an accelerator too; what the accelerator's library keeps for a process is not much."""
    import gc

    import torch

    gc.collect()  # its modules point at each other
    torch.cuda.empty_cache()


def _part(text: str) -> tuple[int, int]:
    """(first shard, step)."""
    k, slash, n = text.partition("/")
    if not (slash and k.isdecimal() and n.isdecimal() and 1 <= int(k) <= int(n)):
        raise OptionError(f"--part is like 2/4, the second of four parts; got {text!r}")
    return int(k) - 1, int(n)


# --- the plan ----------------------------------------------------------------------------------------------------------------------------


def _planned(llm: LLM, folder: Path, given: dict[str, Any], options: dict[str, Any], part: tuple[int, int]) -> FeatureStore:
    """The store to be filled: begun here, or found as this command began it. Says what it will take, and asks."""
    from eyas.train.record import versions
    from eyas.train.state import prepare
    from eyas.train.store import MANIFEST_FILE, FeatureStore, plan_store

    settings = _settings(llm, given, options)
    if (folder / MANIFEST_FILE).exists():
        store = FeatureStore(folder)
        other = store.settings.differences(settings, llm.target.is_named)
        if other:
            raise OptionError(f"{folder} was begun with other settings: {'; '.join(other)}; repeat the old ones, or name another folder")
        _agree(store.manifest, folder, given, [i for i in store.missing() if i % part[1] == part[0]])
        return store
    made = plan_store(settings, read_data(llm, given["data"], given["max_length"], given["heldout"]), versions())
    _agree(made.manifest, folder, given, range(part[0], len(made.manifest.shards), part[1]))
    prepare(folder)
    made.write(folder)
    return FeatureStore(folder)


def _settings(llm: LLM, given: dict[str, Any], options: dict[str, Any]) -> FeatureSettings:
    from eyas.train.data import data_hash
    from eyas.train.store import FeatureSettings, tokenizer_identity

    if llm.tokenizer is None:
        raise InputError("this target has no tokenizer: name one with --tokenizer")
    target, files = llm.target, [{"name": Path(path).name, "sha256": data_hash(path)} for path in given["data"]]
    return FeatureSettings(
        target={"name": target.name, "fingerprint": target.fingerprint(), "dtype": str(target.dtype).removeprefix("torch.")},
        tokenizer=tokenizer_identity(llm.tokenizer),
        layers=_layers(llm, given, options),
        hidden_size=target.hidden_size,
        dtype=given["store_dtype"],
        data={"files": files, "sha256": data_hash(given["data"])},
        max_length=min(given["max_length"], target.context),
        heldout=given["heldout"],
        shard_bytes=int(given["shard_mib"] * 2**20),
    )


def _layers(llm: LLM, given: dict[str, Any], options: dict[str, Any]) -> tuple[int, ...]:
    """Those that are named, or those that the methods named study."""
    from eyas import drafters
    from eyas.core.drafter import build_options, flags
    from eyas.train.features import layers_for_training

    last = llm.target.num_layers
    if given["layers"]:
        try:
            named = sorted({int(part) for part in given["layers"].split(",")})
        except ValueError:
            raise OptionError(f"--layers are whole numbers separated by commas, like 2,8,13,16; got {given['layers']!r}") from None
        if not 0 <= named[0] <= named[-1] <= last:
            raise OptionError(f"--layers are from 0 to {last}, the output of this target's final norm; got {given['layers']!r}")
        return tuple(named)
    kinds = [drafters.find(name) for name in given["method"].split(",")]
    known = [flags(kind.Options) for kind in kinds]
    unknown = {name for name in options if not any(name in own for own in known)}
    chosen = [{name: options[name] for name in options if name in own or name in unknown} for own in known]
    return layers_for_training(llm.target, [(kind, build_options(kind.Options, own)) for kind, own in zip(kinds, chosen, strict=True)])


def _agree(manifest: Manifest, folder: Path, given: dict[str, Any], shards: Sequence[int]) -> None:
    """Say what these shards will take; ask when it is much; refuse what does not fit."""
    settings, gib = manifest.settings, sum(manifest.shards[i].bytes for i in shards) / 2**30
    if not shards:
        return
    existing = next(path for path in [folder, *folder.absolute().parents] if path.exists())
    free = shutil.disk_usage(existing).free / 2**30
    whole = "" if len(shards) == len(manifest.shards) else f" of {len(manifest.shards):,}"
    note(
        f"{manifest.train + manifest.heldout:,} examples, {manifest.tokens:,} tokens, layers {','.join(map(str, settings.layers))} of "
        f"{settings.hidden_size:,} numbers in {settings.dtype}; to be made: {len(shards):,}{whole} shards, {gib:,.2f} GiB; "
        f"free there: {free:,.1f} GiB"
    )
    if gib > free:
        raise InputError(f"{gib:,.2f} GiB do not fit into the {free:,.2f} GiB that are free for {folder}: take less data or fewer layers")
    if gib <= LARGE_GIB or given["yes"]:
        return
    if not _on_terminal():
        raise InputError(f"{gib:,.1f} GiB are much: give --yes if that is meant")
    if not click.confirm(f"Write {gib:,.1f} GiB into {folder}?", err=True):
        raise Interrupted("nothing was written")


def _on_terminal() -> bool:
    return sys.stdin.isatty()


# --- the work ------------------------------------------------------------------------------------------------------------------------


def _work(llm: LLM, store: FeatureStore, todo: Sequence[int], given: dict[str, Any]) -> None:
    """Make these shards in this process."""
    from eyas.train.features import write_features

    with _bar(sum(store.manifest.shards[i].tokens for i in todo), hidden=bool(given["only"])) as show:

        def on_batch(tokens: int) -> None:
            show(tokens)
            if given["of"] not in (None, os.getppid()):
                raise Interrupted("the process that began this one is gone")

        write_features(store, llm.target, todo, given["batch_tokens"], on_batch)


class _Workers:
    """Processes that run this very command, each for some of the shards."""

    def __init__(
        self, store: FeatureStore, todo: Sequence[int], count: int, devices: Sequence[str], called: Sequence[str], notes: Path
    ) -> None:  # fmt: skip
        """`notes`: a folder for what they say on stderr."""
        self.store, self.todo, self.count = store, todo, count
        self.command = [sys.executable, "-m", "eyas", "features", *called]
        self.said = [notes / str(k) for k in range(count)]  # files, not pipes: unread, those hold up who says much
        self.processes = [self.start(todo[k::count], devices[k % len(devices)], said) for k, said in enumerate(self.said)]

    def start(self, shards: Sequence[int], device: str, said: Path) -> subprocess.Popen[bytes]:
        own = ["--only", ",".join(map(str, shards)), "--of", str(os.getpid()), "--device", device, "--workers", "1", "--yes"]
        threads = str(max(1, (os.cpu_count() or 1) // self.count))
        environment = {"OMP_NUM_THREADS": threads, **os.environ} if device in ("cpu", "auto") else dict(os.environ)
        with said.open("wb") as stderr:
            return subprocess.Popen([*self.command, *own], stdout=subprocess.DEVNULL, stderr=stderr, env=environment)

    def run(self) -> None:
        """Wait for all; EyasError when one did not do its part."""
        tokens, left = self.store.manifest.shards, list(self.todo)
        try:
            with _bar(sum(tokens[i].tokens for i in left)) as show:
                while left or any(process.poll() is None for process in self.processes):
                    alive = any(process.poll() is None for process in self.processes)
                    for shard in [i for i in left if not self.store.fault(i)]:
                        left.remove(shard)
                        show(tokens[shard].tokens)
                    if not alive:
                        break
                    time.sleep(0.2)
        except KeyboardInterrupt:
            self.stop()
            raise
        for number, (process, said) in enumerate(zip(self.processes, self.said, strict=True), start=1):
            if process.returncode:
                last = said.read_text(errors="replace").strip().splitlines()[-1:] or [f"ended by signal {-process.returncode}"]
                kept = f"{_count(self.store)} are whole; run the same command again, it goes on"
                raise EyasError(f"worker {number} of {self.count}: {last[0].removeprefix('eyas: error: ')}; {kept}")

    def stop(self) -> None:
        """Ctrl-C reaches them too; whoever does not listen is ended. A shard that is not whole leaves nothing."""
        for process in self.processes:
            try:
                process.wait(timeout=20)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                process.kill()


@contextmanager
def _bar(total: int, unit: str = "tokens", hidden: bool = False) -> Iterator[Callable[[int], None]]:
    """What is done, on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("features"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    began, done = time.monotonic(), 0
    with Progress(*columns, console=console, disable=hidden or not console.is_terminal) as progress:
        task = progress.add_task("", total=total)

        def show(tokens: int) -> None:
            nonlocal done
            done += tokens
            progress.update(task, advance=tokens, description=f"{done / (time.monotonic() - began):,.0f} {unit}/s")

        yield show


# --- the end -------------------------------------------------------------------------------------------------------------------------


def _count(store: FeatureStore) -> str:
    every = len(store.manifest.shards)
    return f"{every - len(store.missing())} of {every} shards"


def _say(store: FeatureStore) -> None:
    gib = sum(shard.bytes for shard in store.manifest.shards) / 2**30
    if store.finish():
        note(f"{store.folder} is complete: {_count(store)}, {store.manifest.tokens:,} tokens, {gib:,.2f} GiB")
    else:
        note(f"this part is done; {_count(store)} are in {store.folder}, the rest is for other parts")


def _verify(store: FeatureStore) -> int:
    with _bar(sum(shard.bytes for shard in store.manifest.shards), "bytes") as show:
        problems = store.verify(show)
    if problems:
        raise InputError("; also ".join(problems[:3]) + (f"; and {len(problems) - 3} more" if len(problems) > 3 else ""))
    store.finish()
    note(f"{store.folder}: {_count(store)} are there, and every checksum is right")
    return 0
