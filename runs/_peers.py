"""Engines for runs/peers.py: the model and its head in the form of each, and a process that answers
questions.

What is made of the model stays in out/peers, so that a second run begins at once.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import _peers_reference

from eyas import tiny
from eyas.checkpoints import ExportTarget, export, load
from eyas.errors import InputError

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = Path(__file__).parent / "engines"
DRAFTS = 3  # tokens that a head drafts in a cycle, in every engine but eyas' auto
Ask = Callable[..., dict[str, Any]]


@dataclass(frozen=True)
class Engine:
    """One way to answer.

    Attributes:
        group: the engine's own name; those of one group are compared with the best of eyas together.
        exact: whether its weights are the model's own, so that its ids should be those of plain decoding.
        start: a context manager that gives `Ask`.
        passes: whether it can tell what a pass costs.
    """

    name: str
    group: str
    start: Callable[[], Any]
    exact: bool = True
    passes: bool = False


@dataclass
class Workshop:
    """Makes what the engines need, once."""

    folder: Path
    threads: int
    llama_cpp: Path | None  # sources of llama.cpp
    llama_build: Path | None
    left_out: dict[str, str] = field(default_factory=dict)  # engine -> why

    def target(self) -> Path:
        """The embedded model as transformers saves it."""
        place = self.folder / "target"
        if not (place / "config.json").exists():
            tiny.model().save_pretrained(place)
            tiny.tokenizer().save_pretrained(place)
        return place

    def head(self) -> Path:
        """Its EAGLE-3 head, in the form that all but OpenVINO read."""
        place = self.folder / "eagle3"
        if not place.exists():
            export(load(tiny.HEADS["eagle3"]), "sglang", place, ExportTarget(str(self.target())))
        return place

    def openvino_head(self) -> Path:
        """The head in the form that optimum-intel converts."""
        place = self.folder / "eagle3-openvino"
        if not place.exists():
            export(load(tiny.HEADS["eagle3"]), "openvino", place, ExportTarget(str(self.target())))
        return place

    def gguf(self, model: Path, kind: str) -> Path:
        """The model or its head by llama.cpp's converter."""
        place = self.folder / f"{model.name}-{kind}.gguf"
        if not place.exists():
            more = [] if model == self.target() else [self.target()]
            self._run(
                [ROOT / ".venv-interop/bin/python", PROGRAMS / "to_gguf.py", self.llama_cpp, kind, model, place, *more]
            )
        return place

    def openvino(self, model: Path, kind: str) -> Path:
        """The model or its head by OpenVINO's converter."""
        place = self.folder / f"openvino-{model.name}-{kind}"
        if not (place / "openvino_model.xml").exists():
            shutil.rmtree(place, ignore_errors=True)
            command: list[Any] = [
                ROOT / ".venv-openvino/bin/optimum-cli",
                "export",
                "openvino",
                "--model",
                model,
                "--weight-format",
                kind,
            ]
            # its own class for such heads asks for it
            trusted = ["--trust-remote-code"] if model == self.openvino_head() else []
            self._run([*command, "--task", "text-generation-with-past", *trusted, place])
        return place

    def _run(self, command: Sequence[Any]) -> None:
        done = subprocess.run(
            [str(part) for part in command], capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}
        )
        if done.returncode:
            raise InputError(
                f"{Path(str(command[1])).name} failed: {(done.stderr.strip() or done.stdout.strip()).splitlines()[-1][:300]}"
            )

    # --- processes

    @contextmanager
    def program(self, python: Path, name: str, log: str, **options: Any) -> Iterator[Ask]:
        """A program of runs/engines, ready."""
        given = json.dumps({"threads": self.threads, **options}, default=str)
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(self.threads)}
        with (
            (self.folder / f"{log}.log").open("w") as errors,
            subprocess.Popen(
                [python, PROGRAMS / name, given],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
            ) as process,
        ):
            stdin, stdout = process.stdin, process.stdout
            assert stdin is not None
            assert stdout is not None

            def read() -> dict[str, Any]:
                line = stdout.readline()
                if not line:
                    raise InputError(f"{log} has ended: see {self.folder / log}.log")
                found: dict[str, Any] = json.loads(line)
                return found

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
    def llama_server(self, kind: str, drafting: bool) -> Iterator[Ask]:
        """llama.cpp's server with one slot."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        assert self.llama_build
        command: list[Any] = [
            self.llama_build / "bin/llama-server",
            "-m",
            self.gguf(self.target(), kind),
            "--port",
            port,
            "-np",
            1,
        ]
        command += ["-c", 1024, "-t", self.threads, "--no-webui", "--cache-ram", 0]
        if drafting:
            head = self.gguf(self.head(), kind)
            command += ["-md", head, "--spec-type", "draft-eagle3", "--spec-draft-n-max", DRAFTS, "-td", self.threads]
        log = self.folder / f"llama-{kind}{'-eagle3' * drafting}.log"
        with (
            log.open("w") as output,
            subprocess.Popen([str(part) for part in command], stdout=output, stderr=output) as process,
        ):
            try:
                yield _llama_asker(f"http://127.0.0.1:{port}", process, log)
            finally:
                process.terminate()


def _llama_asker(url: str, process: subprocess.Popen[bytes], log: Path) -> Ask:
    for _ in range(600):
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                break
        except OSError:
            if process.poll() is not None:
                raise InputError(f"llama-server has ended: see {log}") from None
            time.sleep(0.1)
    drafts, accepted = 0, 0

    def completion(ids: Sequence[int], tokens: int, cached: bool) -> dict[str, Any]:
        body = {
            "prompt": list(ids),
            "n_predict": tokens,
            "temperature": 0,
            "return_tokens": True,
            "cache_prompt": cached,
        }
        request = urllib.request.Request(
            f"{url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as response:
            found: dict[str, Any] = json.load(response)
        return found

    def ask(kind: str, **question: Any) -> dict[str, Any]:
        nonlocal drafts, accepted
        if kind == "versions":
            with urllib.request.urlopen(f"{url}/props", timeout=30) as response:
                return {"llama.cpp": str(json.load(response).get("build_info", "unknown"))}
        if kind == "counts":
            return {"drafts": drafts, "accepted": accepted}
        if kind == "passes":
            return {"seconds": [_pass_seconds(completion, n, **question) for n in question["tokens"]]}
        found = completion(question["ids"], question["max_tokens"], cached=False)
        times = found["timings"]
        accepted += times.get("draft_n_accepted", 0)
        drafts += len(found["tokens"]) - 1 - times.get("draft_n_accepted", 0)
        first = times["prompt_ms"] / 1000
        return {"ids": found["tokens"], "first": first, "seconds": first + times["predicted_ms"] / 1000}

    return ask


def _pass_seconds(completion: Callable[..., dict[str, Any]], n: int, context: int, repeats: int, **_: Any) -> float:
    """A prompt whose first `context` tokens are in the cache: its pass has n tokens."""
    ids, seconds = [7] * context, []
    for repeat in range(repeats + 1):
        completion(ids, 1, cached=True)
        found = completion([*ids, *range(20 + repeat, 20 + repeat + n)], 1, cached=True)["timings"]
        if found["prompt_n"] != n:
            raise InputError(f"llama-server read {found['prompt_n']} tokens and not {n}")
        seconds.append(found["prompt_ms"] / 1000)
    return sorted(seconds[1:])[repeats // 2]


def engines(workshop: Workshop) -> list[Engine]:
    """All engines that are installed here; `workshop.left_out` says which are not."""
    w, target, head = workshop, str(workshop.target()), str(workshop.head())
    own = Path(sys.executable)
    chain = {"draft": head, "tree": {"nodes": DRAFTS + 1, "depth": DRAFTS, "branch": 1}}
    rounded = {"weights": "int8", "activations": "int8"}

    def eyas_engine(name: str, exact: bool = True, **options: Any) -> Engine:
        log = "eyas-" + name.replace(" ", "-").replace(",", "")
        return Engine(
            f"eyas, {name}", "eyas", lambda: w.program(own, "with_eyas.py", log, target=target, **options), exact, True
        )

    def generate(name: str, mode: str) -> Engine:
        start = lambda: w.program(own, "with_transformers.py", f"transformers-{mode}", target=target, mode=mode)  # noqa: E731
        return Engine(f"transformers, {name}", "transformers", start, passes=mode == "plain")

    made = [
        eyas_engine("plain", method="vanilla"),
        eyas_engine(f"EAGLE-3, {DRAFTS} drafts", **chain),
        eyas_engine("EAGLE-3, auto", draft=head),
        eyas_engine("plain, int8", False, method="vanilla", **rounded),
        eyas_engine("EAGLE-3, auto, int8", False, draft=head, **rounded),
        generate("plain", "plain"),
        generate("static cache, compiled", "compiled"),
        generate("prompt lookup", "lookup"),
    ]
    made += _vllm(w, target, head) + _openvino(w) + _llama(w) + _reference(w)
    return made


def _reference(w: Workshop) -> list[Engine]:
    def one(name: str, options: dict[str, Any]) -> Engine:
        log = "reference-plain" if options["plain"] else "reference"
        start = lambda: w.program(_peers_reference.PYTHON, "with_reference.py", log, **options)  # noqa: E731
        return Engine(f"SafeAILab's code, {name}", "SafeAILab's code", start, passes=options["plain"])

    return [one(name, options) for name, options in _peers_reference.ways(w).items()]


def _vllm(w: Workshop, target: str, head: str) -> list[Engine]:
    python = ROOT / ".venv-interop/bin/python"
    if not python.exists():
        w.left_out["vLLM"] = "not installed: make interop"
        return []

    def one(name: str, head: str | None) -> Engine:
        log = "vllm-eagle3" if head else "vllm"
        options = {"target": target, "head": head, "method": "eagle3", "tokens": DRAFTS}
        return Engine(f"vLLM, {name}", "vLLM", lambda: w.program(python, "with_vllm.py", log, **options))

    return [one("plain", None), one(f"EAGLE-3, {DRAFTS} drafts", head)]


def _openvino(w: Workshop) -> list[Engine]:
    python = ROOT / ".venv-openvino/bin/python"
    if not python.exists():
        w.left_out["OpenVINO GenAI"] = "not installed: make interop"
        return []

    def one(kind: str, what: str, **options: Any) -> Engine:
        def start() -> Any:
            drafting = {"head": w.openvino(w.openvino_head(), kind)} if what == "eagle3" else {}
            log = f"openvino-{kind}-{what}"
            return w.program(
                python,
                "with_openvino.py",
                log,
                target=w.openvino(w.target(), kind),
                tokens=DRAFTS,
                **drafting,
                **options,
            )

        shown = {"plain": "plain", "eagle3": f"EAGLE-3, {DRAFTS} drafts", "lookup": "prompt lookup"}[what]
        return Engine(f"OpenVINO GenAI, {shown}, {kind}", "OpenVINO GenAI", start, kind == "fp32", what == "plain")

    return [
        one("fp32", "plain"),
        one("fp32", "eagle3"),
        one("fp32", "lookup", lookup=True),
        one("int8", "plain"),
        one("int8", "eagle3"),
    ]


def _llama(w: Workshop) -> list[Engine]:
    if not (w.llama_cpp and w.llama_build and (w.llama_build / "bin/llama-server").exists()):
        w.left_out["llama.cpp"] = "no build of it was named: LLAMA_CPP=FOLDER"
        return []

    def one(kind: str, drafting: bool) -> Engine:
        name = f"llama.cpp, {f'EAGLE-3, {DRAFTS} drafts' if drafting else 'plain'}, {kind}"
        return Engine(name, "llama.cpp", lambda: w.llama_server(kind, drafting), kind == "f32", not drafting)

    return [one(kind, drafting) for kind in ("f32", "q8_0") for drafting in (False, True)]


def mean_length(counts: Mapping[str, Any]) -> float | None:
    """1 + accepted drafts / cycles; None without drafts."""
    return round(1 + counts["accepted"] / counts["drafts"], 3) if counts.get("accepted") else None
