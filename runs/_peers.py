"""Engines for runs/peers.py: the model and its head in the form of each, and a process that answers
questions.

What is made of the model stays in out/peers, so that a second run begins at once.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from threading import RLock
from typing import Any

import _peers_reference
from _servers import served

import eyas
from eyas.checkpoints import ExportTarget, load
from eyas.errors import InputError
from eyas.named import NamedModel, find
from eyas_train.exports import export

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = Path(__file__).parent / "engines"
OWN = Path(sys.executable)
INTEROP, OPENVINO = (ROOT / f".venv-{name}/bin/python" for name in ("interop", "openvino"))
OFFLINE = {**os.environ, "HF_HUB_OFFLINE": "1"}
DRAFTS = 3  # tokens that a head drafts in a cycle, in every engine but eyas' auto
DRAFTING = f"EAGLE-3, {DRAFTS} drafts"
SUFFIX = {
    "num_speculative_tokens": 24,  # vLLM's default
    "suffix_decoding_max_cached_requests": 0,  # it draws on no earlier answers, as eyas' `suffix`
}
TREE_DRAFTS, TREE = 7, {"branching_factor": 2, "tree_depth": 3}  # of OpenVINO GenAI
Ask = Callable[..., dict[str, Any]]


MAKING = RLock()


def one_at_a_time(make: Callable[..., Path]) -> Callable[..., Path]:
    """Let one thread make a file at a time: engines start side by side, and some need the same one."""

    @wraps(make)
    def made(*arguments: Any) -> Path:
        with MAKING:
            return make(*arguments)

    return made


@dataclass(frozen=True)
class Engine:
    """One way to answer.

    Attributes:
        group: the engine's own name; those of one group are compared with the best of eyas together.
        start: a context manager that gives `Ask`.
        exact: whether its weights are the model's own, so that its ids should be those of plain decoding.
    """

    name: str
    group: str
    start: Callable[[], Any]
    exact: bool = True


@dataclass
class Workshop:
    """Makes what the engines need, once.

    Attributes:
        model: the name of a model of eyas that has an EAGLE-3 head: embedded, smollm2-q4_1.
        dflash: the folder of a DFlash head of that model, which `eyas train --method dflash` makes: none comes with eyas.
    """

    folder: Path
    threads: int
    llama_cpp: Path | None  # sources of llama.cpp
    llama_build: Path | None
    model: str = "embedded"
    dflash: Path | None = None
    left_out: dict[str, str] = field(default_factory=dict)  # engine -> why

    @property
    def named(self) -> NamedModel:
        """The model with its heads."""
        found = find(self.model)
        if found is None or "eagle3" not in found.heads:
            raise InputError(
                f"--target {self.model} is no model of eyas with an EAGLE-3 head: embedded or smollm2-q4_1"
            )
        return found

    @one_at_a_time
    def target(self) -> Path:
        """The model as transformers saves it, in float32."""
        place = self.folder / "target"
        if not (place / "config.json").exists():
            llm = eyas.load(self.model, method="vanilla", kernels="off")
            llm.target.model.float().save_pretrained(place)
            llm.tokenizer.save_pretrained(place)
        return place

    def head(self) -> Path:
        """Its EAGLE-3 head, in the form that all but OpenVINO read."""
        return self._exported(self.named.heads["eagle3"], "eagle3", "sglang")

    def openvino_head(self) -> Path:
        """The head in the form that optimum-intel converts."""
        return self._exported(self.named.heads["eagle3"], "eagle3-openvino", "openvino")

    def dflash_head(self) -> Path:
        """The DFlash head in the form that vLLM reads and optimum-intel converts."""
        assert self.dflash
        made = int((self.dflash / "config.json").stat().st_mtime)  # another head may lie in the same folder later
        return self._exported(self.dflash, f"dflash-{made}", "openvino")

    @one_at_a_time
    def _exported(self, head: Path, name: str, form: str) -> Path:
        place = self.folder / name
        if not place.exists():
            export(load(head), form, place, ExportTarget(str(self.target())))
        return place

    @one_at_a_time
    def gguf(self, model: Path, kind: str) -> Path:
        """The model or its head by llama.cpp's converter, and in four bits by its quantiser."""
        place = self.folder / f"{model.name}-{kind}.gguf"
        if not place.exists() and kind == "q4_0":
            self._run([f"{self.llama_build}/bin/llama-quantize", self.gguf(model, "f32"), place, kind])
        if not place.exists():
            target = [] if model == self.target() else [self.target()]
            program = [INTEROP, PROGRAMS / "to_gguf.py"]
            self._run([*program, self.llama_cpp, kind, model, place, *target])
        return place

    @one_at_a_time
    def openvino(self, model: Path, kind: str) -> Path:
        """The model or its head by OpenVINO's converter."""
        place = self.folder / f"openvino-{model.name}-{kind}"
        if not (place / "openvino_model.xml").exists():
            shutil.rmtree(place, ignore_errors=True)
            options = ["--model", model, "--weight-format", kind, "--task", "text-generation-with-past"]
            # its own classes for heads ask for it
            options += [] if model == self.target() else ["--trust-remote-code"]
            self._run([OPENVINO.with_name("optimum-cli"), "export", "openvino", *options, place])
        return place

    def _run(self, command: Sequence[Any]) -> None:
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, env=OFFLINE)
        if done.returncode:
            reason = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1][:300]
            raise InputError(f"{Path(str(command[1])).name} failed: {reason}")

    # --- processes

    @contextmanager
    def program(self, python: Path, name: str, log: str, **options: Any) -> Iterator[Ask]:
        """A program of runs/engines, ready."""
        command = [python, PROGRAMS / name, json.dumps({"threads": self.threads, **options}, default=str)]
        environment = {**OFFLINE, "OMP_NUM_THREADS": str(self.threads)}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with (
            (self.folder / f"{log}.log").open("w") as errors,
            subprocess.Popen(command, stderr=errors, env=environment, **pipes) as process,
        ):
            stdin, stdout = process.stdin, process.stdout
            assert stdin is not None
            assert stdout is not None

            def read() -> dict[str, Any]:
                line = stdout.readline()
                if not line:
                    raise InputError(f"{log} has ended: see {self.folder / log}.log")
                reply: dict[str, Any] = json.loads(line)
                return reply

            def ask(kind: str, **question: Any) -> dict[str, Any]:
                if kind == "versions":
                    return versions
                stdin.write(json.dumps({"ask": kind, **question}) + "\n")
                stdin.flush()
                return read()

            try:
                versions = read()["versions"]
                yield ask
            finally:
                stdin.close()
                process.wait(30)

    @contextmanager
    def llama_server(self, kind: str, drafting: bool, head: Path | None = None) -> Iterator[Ask]:
        """llama.cpp's server with one slot; `head`: the draft head's file, by default one that llama.cpp's converter makes."""
        assert self.llama_build
        command: list[Any] = [self.llama_build / "bin/llama-server", "-m", self.gguf(self.target(), kind)]
        command += f"--port {{port}} -np 1 -c 1024 -t {self.threads} --no-webui --cache-ram 0".split()
        if drafting:
            options = f"--spec-type draft-eagle3 --spec-draft-n-max {DRAFTS} -td {self.threads}".split()
            command += ["-md", head or self.gguf(self.head(), "q8_0" if kind == "q4_0" else kind), *options]
        with served(command, self.folder / f"llama-{kind}{'-eagle3' * drafting}.log") as (url, _):
            yield _llama_asker(url)


def _llama_asker(url: str) -> Ask:
    drafts, accepted = 0, 0

    def completion(ids: Sequence[int], tokens: int) -> dict[str, Any]:
        body = {
            "prompt": list(ids),
            "n_predict": tokens,
            "temperature": 0,
            "return_tokens": True,
            "cache_prompt": False,
        }
        head = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/completion", json.dumps(body).encode(), head)
        with urllib.request.urlopen(request, timeout=300) as response:
            reply: dict[str, Any] = json.load(response)
        return reply

    def ask(kind: str, **question: Any) -> dict[str, Any]:
        nonlocal drafts, accepted
        if kind == "versions":
            with urllib.request.urlopen(f"{url}/props", timeout=30) as response:
                return {"llama.cpp": str(json.load(response).get("build_info", "unknown"))}
        if kind == "counts":
            return {"drafts": drafts, "accepted": accepted}
        reply = completion(question["ids"], question["max_tokens"])
        times = reply["timings"]
        accepted += times.get("draft_n_accepted", 0)
        drafts += len(reply["tokens"]) - 1 - times.get("draft_n_accepted", 0)
        first = times["prompt_ms"] / 1000
        return {"ids": reply["tokens"], "first": first, "seconds": first + times["predicted_ms"] / 1000}

    return ask


def engines(workshop: Workshop) -> list[Engine]:
    """All engines that are installed here; `workshop.left_out` says which are not."""
    made = _eyas(workshop) + _transformers(workshop)
    made += _vllm(workshop) + _openvino(workshop)
    return made + _llama(workshop) + _reference(workshop)


def _eyas(w: Workshop) -> list[Engine]:
    def one(name: str, exact: bool = True, **options: Any) -> Engine:
        log = "eyas-" + name.replace(" ", "-").replace(",", "")
        start = partial(w.program, OWN, "with_eyas.py", log, target=w.target(), **options)
        return Engine(f"eyas, {name}", "eyas", start, exact)

    head, mtp = w.head(), w.named.heads.get("mtp")
    rounded = {
        kind: {"weights": kind, "activations": "int8" if kind == "int8" else "int16"} for kind in ("int8", "int4")
    }
    chain = {"nodes": DRAFTS + 1, "depth": DRAFTS, "branch": 1}
    return [
        one("plain", method="vanilla"),
        one(DRAFTING, draft=head, tree=chain),
        one("EAGLE-3, auto", draft=head),
        one("suffix decoding", method="suffix"),
        *([one(f"MTP, {DRAFTS} drafts", draft=mtp, tree=chain)] if mtp else []),
        *(
            one(f"{what}, {kind}", False, **how, **options)
            for kind, options in rounded.items()
            for what, how in (("plain", {"method": "vanilla"}), ("EAGLE-3, auto", {"draft": head}))
        ),
    ]


def _transformers(w: Workshop) -> list[Engine]:
    modes = {"plain": "plain", "compiled": "static cache, compiled", "lookup": "prompt lookup"}

    def one(mode: str) -> Engine:
        start = partial(w.program, OWN, "with_transformers.py", f"transformers-{mode}", target=w.target(), mode=mode)
        return Engine(f"transformers, {modes[mode]}", "transformers", start)

    return [one(mode) for mode in modes]


def _reference(w: Workshop) -> list[Engine]:
    if w.model != "embedded":
        w.left_out["SafeAILab's code"] = "its heads are those of the embedded model"
        return []
    if not _peers_reference.PYTHON.exists():
        w.left_out["SafeAILab's code"] = "not installed: make interop"
        return []

    def one(name: str, options: dict[str, Any]) -> Engine:
        log = "reference-plain" if options["plain"] else "reference"
        start = partial(w.program, _peers_reference.PYTHON, "with_reference.py", log, **options)
        return Engine(f"SafeAILab's code, {name}", "SafeAILab's code", start)

    return [one(name, options) for name, options in _peers_reference.ways(w.folder).items()]


def _vllm(w: Workshop) -> list[Engine]:
    if not INTEROP.exists():
        w.left_out["vLLM"] = "not installed: make interop"
        return []

    def one(name: str, method: str = "", **speculative: Any) -> Engine:
        options = {"method": method, **speculative} if method else None
        log = f"vllm-{method or 'plain'}"
        start = partial(w.program, INTEROP, "with_vllm.py", log, target=w.target(), speculative=options)
        return Engine(f"vLLM, {name}", "vLLM", start)

    made = [one("plain"), one(DRAFTING, "eagle3", model=w.head(), num_speculative_tokens=DRAFTS)]
    if not any(INTEROP.parents[1].glob("lib/*/site-packages/arctic_inference")):
        w.left_out["vLLM, suffix decoding"] = "arctic-inference is not installed: make interop"
        return made
    return [*made, one("suffix decoding", "suffix", **SUFFIX)]


def _openvino(w: Workshop) -> list[Engine]:
    if not OPENVINO.exists():
        w.left_out["OpenVINO GenAI"] = "not installed: make interop"
        return []
    tree = f"EAGLE-3, a tree of {TREE_DRAFTS} drafts"
    shown = {"plain": "plain", "eagle3": DRAFTING, "tree": tree, "lookup": "prompt lookup"}

    def one(kind: str, what: str) -> Engine:
        def start() -> Any:
            options: dict[str, Any] = {"lookup": True} if what == "lookup" else {}
            options |= {"head": w.openvino(w.openvino_head(), kind)} if what in ("eagle3", "tree") else {}
            options |= {"tree": TREE, "tokens": TREE_DRAFTS} if what == "tree" else {"tokens": DRAFTS}
            target = w.openvino(w.target(), kind)
            return w.program(OPENVINO, "with_openvino.py", f"openvino-{kind}-{what}", target=target, **options)

        name = f"OpenVINO GenAI, {shown[what]}, {kind}"
        return Engine(name, "OpenVINO GenAI", start, exact=kind == "fp32")

    return [*(one("fp32", what) for what in shown), *(one("int8", what) for what in shown if what != "lookup")]


def _llama(w: Workshop) -> list[Engine]:
    if not (w.llama_cpp and w.llama_build and (w.llama_build / "bin/llama-server").exists()):
        w.left_out["llama.cpp"] = "no build of it was named: LLAMA_CPP=FOLDER"
        return []

    def one(kind: str, drafting: bool) -> Engine:
        name = f"llama.cpp, {DRAFTING if drafting else 'plain'}, {kind}"
        return Engine(name, "llama.cpp", partial(w.llama_server, kind, drafting), kind == "f32")

    return [one(kind, drafting) for kind in ("f32", "q8_0", "q4_0") for drafting in (False, True)]


def mean_length(counts: Mapping[str, Any]) -> float | None:
    """1 + accepted drafts / cycles; None without drafts."""
    return round(1 + counts["accepted"] / counts["drafts"], 3) if counts.get("accepted") else None
