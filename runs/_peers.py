"""Engines for runs/peers.py: the model and its head in the form of each, and a process that answers questions."""

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
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _servers import served
from safetensors.torch import load_file

import eyas
from eyas import tiny
from eyas.checkpoints import ExportTarget, load
from eyas.errors import InputError
from eyas.named import NamedModel, find
from eyas_train.exports import export

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = Path(__file__).parent / "engines"
OWN = Path(sys.executable)
INTEROP, OPENVINO, REFERENCE = (ROOT / f".venv-{name}/bin/python" for name in ("interop", "openvino", "reference"))
OFFLINE = {**os.environ, "HF_HUB_OFFLINE": "1"}
DRAFTS = 3  # tokens that a head drafts in a cycle, in every engine but eyas' auto
DRAFTING = f"EAGLE-3, {DRAFTS} drafts"
# vLLM's default length; it draws on no earlier answers, as eyas' `suffix`
SUFFIX = {"num_speculative_tokens": 24, "suffix_decoding_max_cached_requests": 0}
Ask = Callable[..., dict[str, Any]]


@dataclass(frozen=True)
class Engine:
    """One way to answer.

    Attributes:
        start: a context manager that gives `Ask`.
        exact: whether its weights are the model's own, so that its ids should be those of plain decoding.
    """

    name: str
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
            raise InputError(f"--target {self.model} has no EAGLE-3 head in eyas: use embedded or smollm2-q4_1")
        return found

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

    def _exported(self, head: Path, name: str, form: str) -> Path:
        place = self.folder / name
        if not place.exists():
            export(load(head), form, place, ExportTarget(str(self.target())))
        return place

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
    settings = {"temperature": 0, "return_tokens": True, "cache_prompt": False}

    def ask(kind: str, **question: Any) -> dict[str, Any]:
        nonlocal drafts, accepted
        if kind == "versions":
            with urllib.request.urlopen(f"{url}/props", timeout=30) as response:
                return {"llama.cpp": str(json.load(response).get("build_info", "unknown"))}
        if kind == "counts":
            return {"drafts": drafts, "accepted": accepted}
        body = {"prompt": list(question["ids"]), "n_predict": question["max_tokens"], **settings}
        head = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/completion", json.dumps(body).encode(), head)
        with urllib.request.urlopen(request, timeout=300) as response:
            reply = json.load(response)
        times = reply["timings"]
        accepted += times.get("draft_n_accepted", 0)
        drafts += len(reply["tokens"]) - 1 - times.get("draft_n_accepted", 0)
        first = times["prompt_ms"] / 1000
        return {"ids": reply["tokens"], "first": first, "seconds": first + times["predicted_ms"] / 1000}

    return ask


def engines(w: Workshop) -> list[Engine]:
    """All engines that are installed here; `w.left_out` says which are not."""
    made = [*_eyas(w), *_transformers(w)]
    others = {"vLLM": _vllm, "OpenVINO GenAI": _openvino, "llama.cpp": _llama, "SafeAILab's code": _reference}
    for name, of in others.items():
        found = of(w)
        if isinstance(found, str):
            w.left_out[name] = found
        else:
            made += found
    return made


def _eyas(w: Workshop) -> Iterator[Engine]:
    def one(name: str, exact: bool = True, **options: Any) -> Engine:
        log = "eyas-" + name.replace(" ", "-").replace(",", "")
        return Engine(
            f"eyas, {name}", partial(w.program, OWN, "with_eyas.py", log, target=w.target(), **options), exact
        )

    head, mtp = w.head(), w.named.heads.get("mtp")
    chain = {"nodes": DRAFTS + 1, "depth": DRAFTS, "branch": 1}
    yield one("plain", method="vanilla")
    yield one(DRAFTING, draft=head, tree=chain)
    yield one("EAGLE-3, auto", draft=head)
    yield one("suffix decoding", method="suffix")
    if mtp:
        yield one(f"MTP, {DRAFTS} drafts", draft=mtp, tree=chain)
    for weights, activations in (("int8", "int8"), ("int4", "int16")):
        rounded = {"weights": weights, "activations": activations}
        yield one(f"plain, {weights}", False, method="vanilla", **rounded)
        yield one(f"EAGLE-3, auto, {weights}", False, draft=head, **rounded)


def _transformers(w: Workshop) -> Iterator[Engine]:
    for mode, name in (("plain", "plain"), ("compiled", "static cache, compiled")):
        start = partial(w.program, OWN, "with_transformers.py", f"transformers-{mode}", target=w.target(), mode=mode)
        yield Engine(f"transformers, {name}", start)


def _vllm(w: Workshop) -> list[Engine] | str:
    if not INTEROP.exists():
        return "not installed: make interop"

    def one(name: str, method: str = "", **speculative: Any) -> Engine:
        options = {"method": method, **speculative} if method else None
        log = f"vllm-{method or 'plain'}"
        start = partial(w.program, INTEROP, "with_vllm.py", log, target=w.target(), speculative=options)
        return Engine(f"vLLM, {name}", start)

    made = [one("plain"), one(DRAFTING, "eagle3", model=w.head(), num_speculative_tokens=DRAFTS)]
    if any(INTEROP.parents[1].glob("lib/*/site-packages/arctic_inference")):
        made.append(one("suffix decoding", "suffix", **SUFFIX))
    return made


def _openvino(w: Workshop) -> list[Engine] | str:
    if not OPENVINO.exists():
        return "not installed: make interop"

    def one(kind: str, drafting: bool) -> Engine:
        def start() -> Any:
            head = {"head": w.openvino(w.openvino_head(), kind), "tokens": DRAFTS} if drafting else {}
            log = f"openvino-{kind}{'-eagle3' * drafting}"
            return w.program(OPENVINO, "with_openvino.py", log, target=w.openvino(w.target(), kind), **head)

        name = f"OpenVINO GenAI, {DRAFTING if drafting else 'plain'}, {kind}"
        return Engine(name, start, exact=kind == "fp32")

    return [one(kind, drafting) for kind in ("fp32", "int8") for drafting in (False, True)]


def _llama(w: Workshop) -> list[Engine] | str:
    if not (w.llama_cpp and w.llama_build and (w.llama_build / "bin/llama-server").exists()):
        return "no build of it was named: LLAMA_CPP=FOLDER"

    def one(kind: str, drafting: bool) -> Engine:
        name = f"llama.cpp, {DRAFTING if drafting else 'plain'}, {kind}"
        return Engine(name, partial(w.llama_server, kind, drafting), kind == "f32")

    return [one(kind, drafting) for kind in ("f32", "q8_0", "q4_0") for drafting in (False, True)]


def _reference(w: Workshop) -> list[Engine] | str:
    """SafeAILab's package eagle-llm 1.2.1, which is EAGLE-1 with its static tree of 26 nodes."""
    if w.model != "embedded" or not REFERENCE.exists():
        return "it takes the embedded model, and is installed by make interop"

    def one(name: str, plain: bool) -> Engine:
        log = f"reference{'-plain' * plain}"
        places = {"target": reference_target(w.folder), "head": reference_head(w.folder)}
        start = partial(w.program, REFERENCE, "with_reference.py", log, plain=plain, **places)
        return Engine(f"SafeAILab's code, {name}", start)

    return [one("plain", True), one("EAGLE-1, static tree", False)]


def reference_target(workshop: Path) -> Path:
    """The target as eagle-llm 1.2.1 reads it, in the form of transformers of 2024: shards with an index, `rope_theta`
    beside the other settings, merges as strings."""
    place = workshop / "reference-target"
    if not (place / "model.safetensors.index.json").exists():
        tiny.model().save_pretrained(place, max_shard_size="20MB")
        tiny.tokenizer().save_pretrained(place)
        config = json.loads((place / "config.json").read_text())
        config |= {"rope_theta": config.pop("rope_parameters")["rope_theta"], "rope_scaling": None}
        (place / "config.json").write_text(json.dumps(config))
        settings = json.loads((place / "tokenizer_config.json").read_text())
        known = {name: settings[name] for name in ("bos_token", "eos_token", "pad_token", "model_max_length")}
        known["tokenizer_class"] = "PreTrainedTokenizerFast"
        (place / "tokenizer_config.json").write_text(json.dumps(known))
        tokenizer = json.loads((place / "tokenizer.json").read_text())
        # as tokenizers wrote them before 0.20
        tokenizer["model"]["merges"] = [" ".join(pair) for pair in tokenizer["model"]["merges"]]
        (place / "tokenizer.json").write_text(json.dumps(tokenizer))
    return place


def reference_head(workshop: Path) -> Path:
    """The EAGLE-1 head in its authors' format: a pickle that holds the embedding too."""
    place = workshop / "reference-eagle1"
    if not place.exists():
        export(load(tiny.HEADS["eagle1"]), "safeailab", place, ExportTarget(str(reference_target(workshop))))
        tensors = {name: tensor.float() for name, tensor in load_file(place / "model.safetensors").items()}
        embedding = tiny.model().get_input_embeddings().weight.detach().float().clone()
        tensors.setdefault("embed_tokens.weight", embedding)
        torch.save(tensors, place / "pytorch_model.bin")
    return place


def mean_length(counts: Mapping[str, Any]) -> float | None:
    """1 + accepted drafts / cycles; None without drafts."""
    return round(1 + counts["accepted"] / counts["drafts"], 3) if counts.get("accepted") else None
