"""Several processes of one run, met over gloo and a file, without a launcher or a port.

They are forked from a server that has already imported what they need: an import costs more than these runs."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from processes import WorkLimit

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["train.toy", "train.real", "eyas.drafters.eagle1", "eyas.drafters.eagle3", "torch.distributed.fsdp"]
)


def together(program: Callable[..., Any], *arguments: Any, count: int = 2, **options: Any) -> list[Any]:
    """Returns the results of `program` in all processes; RuntimeError with the tracebacks when one failed."""
    with tempfile.TemporaryDirectory() as place:
        processes = [
            CONTEXT.Process(target=_run, args=(rank, count, place, program, arguments, options))
            for rank in range(count)
        ]
        for process in processes:
            process.start()
        try:
            for process in processes:
                _join(process)
        finally:
            for process in processes:
                process.kill()
                process.join()
        said = "\n".join(f"process {path.stem}: {path.read_text()}" for path in sorted(Path(place).glob("*.error")))
        if said or any(process.exitcode for process in processes):
            raise RuntimeError(f"exit codes {[process.exitcode for process in processes]}; {said}")
        return [torch.load(Path(place, f"{rank}.result"), weights_only=False) for rank in range(count)]


def _join(process: Any) -> None:
    """Wait for its end; AssertionError when it hangs or computes for too long."""
    limit = WorkLimit(process.pid)
    while process.is_alive():
        process.join(1)
        limit.check()


def _run(
    rank: int, count: int, place: str, program: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]
) -> None:
    import torch.distributed as dist

    os.environ.update(WORLD_SIZE=str(count), RANK=str(rank), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=count)
        torch.save(program(*arguments, **options), Path(place, f"{rank}.result"))
        dist.destroy_process_group()
    except BaseException:
        Path(place, f"{rank}.error").write_text(traceback.format_exc())
        os._exit(1)
