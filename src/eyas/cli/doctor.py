"""`eyas doctor`: the installed packages, the machine, and whether the embedded model is whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import NamedTuple

from eyas.cli._load import plain_decoding, quiet
from eyas.cli._options import AS_JSON, Fields
from eyas.files import CHECKSUMS, sha256_of_folder

GROUP = "Information"
CPU_FLAGS = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_bf16": "AVX-512 bf16",
    "avx512_vnni": "AVX-512 VNNI",
    "amx_bf16": "AMX bf16",
    "amx_int8": "AMX int8",
}
SELF_TEST_TOKENS = 16
MARKS = {True: "[green] ok [/]", False: "[red]FAIL[/]", None: "    "}


class Finding(NamedTuple):
    """One line of the report."""

    topic: str
    good: bool | None  # None: neither good nor bad
    what: str


def command(*, as_json: AS_JSON = False) -> int:
    """Check the installation, the machine and the embedded model. Exit status 1 when something is broken."""
    machine = _machine()
    findings = [*_requirements(), *_bfloat16(), *_find_embedded()]
    broken = [finding.what for finding in findings if finding.good is False]
    if as_json:
        checks = [finding._asdict() for finding in findings]
        print(json.dumps({"ok": not broken, **machine, "checks": checks, "problems": broken}))
    else:
        _print([*_describe(machine), *findings], len(broken))
    return 1 if broken else 0


def _describe(machine: Fields) -> Iterator[Finding]:
    cpu, memory = machine["cpu"], machine["memory"]
    flags = ", ".join(cpu["flags"]) or "no flags known"
    gpus = [f"{gpu['name']}, {gpu['free_gb']:.1f} of {gpu['total_gb']:.1f} GB free" for gpu in machine["gpus"]]
    processor = f"{cpu['name']}, {cpu['usable_cores']} cores usable, {cpu['threads']} threads; {flags}"
    yield Finding("versions", None, ", ".join(f"{name} {number}" for name, number in machine["versions"].items()))
    yield Finding("cpu", None, processor)
    yield Finding("memory", None, f"{memory['free_gb']:.1f} of {memory['total_gb']:.1f} GB free")
    yield Finding("gpu", None, "; ".join(gpus) or "none: everything runs on the CPU")
    for name, state in machine["fast_paths"].items():
        yield Finding("fast path", None, f"{name}: {state}")


def _print(findings: list[Finding], broken: int) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False)
    for topic, good, what in findings:
        console.print(f"{MARKS[good]} [dim]{topic:<10}[/] {escape(what)}", soft_wrap=True)
    console.print(f"[red]{broken} broken[/]" if broken else "[green]all is well[/]")


def _machine() -> Fields:
    import psutil
    import torch

    from eyas import hardware
    from eyas.hardware.machine import cores

    known = set(hardware.cpu().get("flags", "").split())
    cpu = {"name": hardware.cpu_name(), "usable_cores": len(cores()), "threads": torch.get_num_threads()}
    memory = psutil.virtual_memory()
    gpus = []
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(i)
        gpus.append({"name": torch.cuda.get_device_name(i), "free_gb": free / 1e9, "total_gb": total / 1e9})
    return {
        "versions": hardware.versions(),
        "cpu": {**cpu, "flags": [name for flag, name in CPU_FLAGS.items() if flag in known]},
        "gpus": gpus,
        "memory": {"free_gb": memory.available / 1e9, "total_gb": memory.total / 1e9},
        "fast_paths": _fast_paths(),
    }


def _fast_paths() -> dict[str, str]:
    from eyas import kernels

    reason = kernels.why_not()
    return {
        "compiled kernels (CPU)": reason or f"built and loaded{', with AMX' if kernels.has_amx() else ''}",
        "CUDA graphs": "by eyas-gpu, with --kernels auto or on; --kernels compile adds torch.compile; tried on one H200 only",
    }


def _requirements() -> list[Finding]:
    """Return whether every package that eyas needs is there, and new enough."""
    from packaging.requirements import Requirement

    try:
        needed = [Requirement(line) for line in requires("eyas") or []]
    except PackageNotFoundError:
        return [Finding("packages", None, "eyas is not installed but run from its sources: versions are not checked")]
    faults = []
    for need in needed:
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        try:
            installed = version(need.name)
        except PackageNotFoundError:
            fault = "is missing"
        else:
            if need.specifier.contains(installed, prereleases=True):
                continue
            fault = f"{installed} is not {need.specifier}"
        repair = f"pip install '{need.name}{need.specifier}'"
        faults.append(Finding("packages", False, f"{need.name} {fault}; {repair}"))
    return faults or [Finding("packages", True, "every package is there and new enough")]


def _bfloat16() -> Iterator[Finding]:
    """Yield a remark where torch cannot multiply bfloat16 matrices; nothing where it can."""
    from eyas.hardware import BFLOAT16_CURE, bfloat16_gain

    if not bfloat16_gain():
        yield Finding("bfloat16", None, f"--dtype bfloat16 without kernels: {BFLOAT16_CURE}")


def _find_embedded() -> list[Finding]:
    from eyas import tiny

    if not tiny.FOLDER.is_dir():
        return [Finding("embedded", None, tiny.MISSING)]
    return [_intact(tiny.FOLDER), *_self_test()]


def _intact(folder: Path) -> Finding:
    try:
        expected, actual = json.loads((folder / CHECKSUMS).read_text()), sha256_of_folder(folder)
    except (OSError, ValueError, RecursionError) as error:
        reason = error.__class__.__name__
        return Finding("embedded", False, f"{CHECKSUMS} cannot be read ({reason}): install eyas-tiny again")
    if not isinstance(expected, dict) or not expected:
        return Finding("embedded", False, f"{CHECKSUMS} lists no files: install eyas-tiny again")
    if changed := [name for name, digest in expected.items() if actual.get(name) != digest]:
        return Finding("embedded", False, f"missing or changed: {', '.join(changed)}; install eyas-tiny again")
    return Finding(
        "embedded", True, f"{len(expected)} files of the embedded model and its heads are as they were shipped"
    )


def _self_test() -> list[Finding]:
    """Check that the model loads, that its head is read correctly, and that drafting changes nothing."""
    from eyas.api import load
    from eyas.errors import EyasError

    try:
        with quiet():
            best = load(tree="fixed")
    except EyasError as error:
        return [Finding("self-test", False, str(error))]
    exact = best.target.head_is_exact
    llms = (plain_decoding(best), best)
    answers = [llm.generate("Hello!", max_new_tokens=SELF_TEST_TOKENS, ignore_eos=True) for llm in llms]
    equal, tau = answers[0].token_ids == answers[1].token_ids, answers[1].stats.tau
    verdict = "generate the same" if equal else "differ in"
    answered = f"plain decoding and {best.method} {verdict} {SELF_TEST_TOKENS} tokens (tau {tau:.2f})"
    logits = f"the logits that drafts are verified with {'equal' if exact else 'differ from'} the model's own"
    return [Finding("self-test", exact, logits), Finding("self-test", equal, answered)]
