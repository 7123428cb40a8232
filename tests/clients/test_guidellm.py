"""guidellm measures the server: it asks for streams with usage in every chunk, and counts what comes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from serving import PROMPTS, Running

pytestmark = pytest.mark.slow
TOKENS = 24
Run = Callable[..., CompletedProcess[str]]


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/completions"])
def test_a_benchmark(run: Run, server: Running, folder: Path, tmp_path: Path, endpoint: str) -> None:
    """Every request succeeds and has as many tokens as it asked for; an empty answer or an error in
    the stream would be counted as one."""
    requests = [{"prompt": prompt, "output_tokens_count": TOKENS} for prompt in PROMPTS * 2]
    (tmp_path / "requests.jsonl").write_text("".join(json.dumps(one) + "\n" for one in requests))
    run(
        "guidellm", "run", "--disable-console-interactive",
        "--backend", f"kind=openai_http,target={server.url},request_format={endpoint}",
        "--profile", "kind=concurrent,streams=3",
        "--constraint", f"kind=max_requests,count={len(requests)}",
        "--data", "kind=json_file,path=requests.jsonl",
        "--tokenizer", f"kind=hf_auto,model={folder}",
        "--output", "kind=json,path=report.json",
    )  # fmt: skip
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    assert not benchmark["requests"]["errored"]
    done = benchmark["requests"]["successful"]
    assert len(done) == len(requests)
    assert {one["output_metrics"]["text_tokens"] for one in done} == {TOKENS}
    server.wait_until_idle()
