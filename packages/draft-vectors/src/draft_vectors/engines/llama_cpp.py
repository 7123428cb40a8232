"""llama.cpp, by its own converter and server: `LLAMA_CPP=FOLDER python -m draft_vectors draft_vectors.engines.llama_cpp:LlamaCpp`.

FOLDER has the sources, and the build in `build` (or in LLAMA_CPP_BUILD). The converter needs torch, transformers and
sentencepiece. The server drafts chains, and its random numbers are its own, so greedy chains run.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from draft_vectors.decode import Case
from draft_vectors.runner import Answer, Engine, head_folder

__all__ = ["LlamaCpp"]

EXACT = "-ctk f32 -ctv f32 -ctkd f32 -ctvd f32 -fa off -np 1 -c 256 -t 1 -td 1 --no-webui --cache-ram 0"
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
    "model": {"type": "BPE", "byte_fallback": True, "merges": [], "vocab": {f"<0x{i:02X}>": i for i in range(128)}},
}  # the converter wants one: a token is a byte


class LlamaCpp(Engine):
    """llama-server, one head at a time."""

    name = "llama.cpp"

    def __init__(self, data: Path, dtype: str = "float32") -> None:
        super().__init__(data, dtype)
        self.sources = Path(os.environ["LLAMA_CPP"])
        self.build = Path(os.environ.get("LLAMA_CPP_BUILD") or self.sources / "build")
        self.place = tempfile.TemporaryDirectory()
        self.target = Path(self.place.name) / "target"
        shutil.copytree(data / "target", self.target)
        (self.target / "tokenizer.json").write_text(json.dumps(TOKENIZER))
        (self.target / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
        self.url, self.serves = "", ""
        self.stop: Callable[[], Any] = lambda: None

    def converted(self, model: Path) -> Path:
        """Return the file of the target or of a head, by their converter."""
        file = Path(self.place.name) / f"{model.name}.gguf"
        if not file.exists():
            program = [sys.executable, str(self.sources / "convert_hf_to_gguf.py"), str(model), "--outfile", str(file)]
            options = ["--outtype", {"float32": "f32", "bfloat16": "bf16"}[self.dtype]]
            options += [] if model == self.target else ["--target-model-dir", str(self.target)]
            subprocess.run([*program, *options], check=True, stdout=subprocess.DEVNULL)
        return file

    def serve(self, case: Case) -> None:
        """Start the server with the head of a case."""
        self.stop()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [self.build / "bin" / "llama-server", "--port", port, "-m", self.converted(self.target)]
        command += ["-md", self.converted(head_folder(self.data, case)), "--spec-type", f"draft-{case.method}"]
        command += ["--spec-draft-n-max", case.depth, *EXACT.split()]
        server = subprocess.Popen([str(part) for part in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.stop = weakref.finalize(self, _end, server)
        self.url, self.serves = f"http://127.0.0.1:{port}", case.name
        while server.poll() is None:
            try:
                urllib.request.urlopen(f"{self.url}/health").close()
                return
            except OSError:
                time.sleep(0.1)
        raise RuntimeError(f"llama-server ended with status {server.returncode}")

    def generate(self, case: Case, prompt: Sequence[int]) -> Answer | None:
        if case.method not in ("eagle3", "dflash", "dspark") or case.tree != "chain" or case.rule != "greedy":
            return None
        if self.serves != case.name:
            self.serve(case)
        ids, accepted = list[int](), dict[int, int]()  # accepted tokens so far, by the drafted tokens so far
        for part in self.parts(prompt, case.new_tokens):
            ids += part["tokens"]
            times = part["timings"]
            accepted[times.get("draft_n", 0)] = times.get("draft_n_accepted", 0)
        sums = [accepted[drafted] for drafted in sorted(accepted)]
        return Answer(ids, [after - before for before, after in itertools.pairwise(sums)])

    def parts(self, prompt: Sequence[int], new_tokens: int) -> Iterator[dict[str, Any]]:
        """Yield the messages of an answer, each with its new tokens and the counts of drafts."""
        asked = {"prompt": list(prompt), "n_predict": new_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        asked |= {"return_tokens": True, "timings_per_token": True, "cache_prompt": False}
        request = urllib.request.Request(f"{self.url}/completion", json.dumps(asked).encode())
        with urllib.request.urlopen(request) as lines:
            yield from (json.loads(line[6:]) for line in lines if line.startswith(b"data: {"))


def _end(server: subprocess.Popen[bytes]) -> None:
    server.kill()
    server.wait()
