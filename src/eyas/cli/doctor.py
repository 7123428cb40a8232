"""`eyas doctor`: what is installed, what the machine has, and whether the embedded model is whole."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, NamedTuple

import rich_click as click

from eyas.cli._load import quiet, versions
from eyas.cli._options import Command, option

__all__ = ["CHECKSUMS", "command", "digests"]

CHECKSUMS = "checksums.json"  # in tiny.FOLDER: {"path in the folder": "sha256 in hex"}
CPU_FLAGS = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_bf16": "AVX-512 bf16",
    "avx512_vnni": "AVX-512 VNNI",
    "amx_bf16": "AMX bf16",
    "amx_int8": "AMX int8",
}
SELF_TEST_TOKENS = 16


class Finding(NamedTuple):
    """One line of the report."""

    topic: str
    good: bool | None  # None: neither good nor bad
    what: str


@click.command("doctor", cls=Command, panel="What is here")
@option("Output", "--json", "as_json", is_flag=True, help="One JSON object as the last line of stdout.")
def command(as_json: bool) -> int:
    """Check the installation, the machine and the embedded model. Exit status 1 when something is broken."""
    machine = {"cpu": _cpu(), "gpus": _gpus(), "memory": _memory()}
    findings = [*_requirements(), *_embedded()]
    broken = [finding.what for finding in findings if finding.good is False]
    if as_json:
        checks = [finding._asdict() for finding in findings]
        report = {"ok": not broken, "versions": versions(), **machine, "fast_paths": _fast_paths(), "checks": checks, "problems": broken}
        click.echo(json.dumps(report))
    else:
        _print(machine, findings, broken)
    return 1 if broken else 0


def _print(machine: dict[str, Any], findings: list[Finding], broken: list[str]) -> None:
    from rich.console import Console
    from rich.markup import escape

    cpu, memory, console = machine["cpu"], machine["memory"], Console(highlight=False)
    gpus = [f"{gpu['name']}, {gpu['free_gb']:.1f} of {gpu['total_gb']:.1f} GB free" for gpu in machine["gpus"]]
    rows = [
        ("versions", ", ".join(f"{name} {number}" for name, number in versions().items())),
        (
            "cpu",
            f"{cpu['name']}, {cpu['usable_cores']} cores usable, {cpu['threads']} threads; {', '.join(cpu['flags']) or 'no flags known'}",
        ),
        ("memory", f"{memory['free_gb']:.1f} of {memory['total_gb']:.1f} GB free"),
        ("gpu", "; ".join(gpus) or "none: everything runs on the CPU"),
        *(("fast path", f"{name}: {state}") for name, state in _fast_paths().items()),
    ]
    for topic, what in rows:
        console.print(f"     [dim]{topic:<10}[/] {escape(what)}", soft_wrap=True)
    marks = {True: "[green] ok [/]", False: "[red]FAIL[/]", None: "    "}
    for finding in findings:
        console.print(f"{marks[finding.good]} [dim]{finding.topic:<10}[/] {escape(finding.what)}", soft_wrap=True)
    console.print(f"[red]{len(broken)} broken[/]" if broken else "[green]all is well[/]")


# --- the machine -----------------------------------------------------------------------------------------------------------------------


def _cpu() -> dict[str, Any]:
    import torch

    from eyas import hardware
    from eyas.bench import machine

    has = set(hardware.cpu().get("flags", "").split())
    return {
        "name": hardware.cpu_name(),
        "usable_cores": len(machine.cores()),
        "threads": torch.get_num_threads(),
        "flags": [name for flag, name in CPU_FLAGS.items() if flag in has],
    }


def _gpus() -> list[dict[str, Any]]:
    import torch

    found = []
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(i)
        found.append({"name": torch.cuda.get_device_name(i), "free_gb": free / 1e9, "total_gb": total / 1e9})
    return found


def _memory() -> dict[str, float]:
    import psutil

    memory = psutil.virtual_memory()
    return {"free_gb": memory.available / 1e9, "total_gb": memory.total / 1e9}


def _fast_paths() -> dict[str, str]:
    """What makes a forward faster than running the model as it is."""
    from eyas import kernels

    return {
        "compiled kernels (CPU)": kernels.why_not() or f"built and loaded{', with AMX' if kernels.has_amx() else ''}",
        "CUDA graphs": "by --kernels on, with compiled layers by --kernels compile; not yet run on a GPU",
    }


# --- the installation ------------------------------------------------------------------------------------------------------------------


def _requirements() -> list[Finding]:
    """Is every package there that eyas names, and not older than it says?"""
    from packaging.requirements import Requirement

    try:
        wanted = [Requirement(line) for line in requires("eyas") or []]
    except PackageNotFoundError:
        return [Finding("packages", None, "eyas is not installed but run from its sources: versions are not checked")]
    faults = []
    for need in wanted:
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        repair = f"pip install '{need.name}{need.specifier}'"
        try:
            found = version(need.name)
        except PackageNotFoundError:
            faults.append(Finding("packages", False, f"{need.name} is missing; {repair}"))
            continue
        if not need.specifier.contains(found, prereleases=True):
            faults.append(Finding("packages", False, f"{need.name} {found} is not {need.specifier}; {repair}"))
    return faults or [Finding("packages", True, "every package is there and new enough")]


# --- the embedded model ----------------------------------------------------------------------------------------------------------------


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below a folder, by its path there: what CHECKSUMS holds."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != CHECKSUMS)
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _embedded() -> list[Finding]:
    from eyas import tiny

    if not tiny.FOLDER.is_dir():
        return [Finding("embedded", False, "the embedded model is not here: install eyas again")]
    return [_intact(tiny.FOLDER), *_self_test()]


def _intact(folder: Path) -> Finding:
    try:
        promised = json.loads((folder / CHECKSUMS).read_text())
        found = digests(folder)
    except (OSError, ValueError) as error:
        return Finding("embedded", False, f"{CHECKSUMS} cannot be read ({error.__class__.__name__}): install eyas again")
    other = [name for name, digest in promised.items() if found.get(name) != digest]
    if other:
        return Finding("embedded", False, f"missing or changed: {', '.join(other)}; install eyas again")
    return Finding("embedded", True, f"{len(promised)} files of the embedded model and its head are as they were shipped")


def _self_test() -> list[Finding]:
    """Does the model load, is its head read rightly, and does drafting change nothing?"""
    from eyas import drafters
    from eyas.api import LLM, load
    from eyas.errors import EyasError

    try:
        with quiet():
            best = load(tree="fixed")
    except EyasError as error:
        return [Finding("self-test", False, str(error))]
    exact = best.target.head_is_exact
    plain = LLM(best.target, drafters.find("vanilla").load(None, best.target), best.tokenizer)
    said = [llm.generate("Hello!", max_new_tokens=SELF_TEST_TOKENS, ignore_eos=True) for llm in (plain, best)]
    equal, tau = said[0].token_ids == said[1].token_ids, said[1].stats.tau
    verdict = "say the same" if equal else "differ in"
    return [
        Finding("self-test", exact, f"our head {'gives' if exact else 'does not give'} the model's own logits"),
        Finding("self-test", equal, f"plain decoding and {best.method} {verdict} {SELF_TEST_TOKENS} tokens (tau {tau:.2f})"),
    ]
