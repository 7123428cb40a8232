"""The pages about the server are true: their clients get answers, their metrics and options exist."""

import json
import re
from pathlib import Path

import openai
import pytest

import eyas
from eyas import checkpoints
from eyas.core.options import build_options
from eyas.drafters import find
from eyas.recall import Pools
from eyas_train.adapt import Heads
from serving import Running, curl, running, small_llm
from test_public import PAGES, shell_lines

ROOT = Path(__file__).parents[2]
SERVING = "\n".join((ROOT / "docs" / page).read_text() for page in ("guide/serve.md", "reference/http.md"))
README = (ROOT / "README.md").read_text()
ADDRESS = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def embedded(llm: eyas.LLM) -> object:
    """A server whose model has the name that `make serve` gives it."""
    with running(llm, name="embedded", rows=2) as one:
        yield one


CURLS = [line for page in PAGES for line in shell_lines(page) if line.startswith(f"curl {ADDRESS}")]


@pytest.mark.slow
@pytest.mark.parametrize("line", CURLS, ids=lambda line: line.split()[1].rpartition("/")[2])
def test_requests_of_the_pages(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a request that a newcomer copies is refused."""
    llm = small_llm()
    monkeypatch.chdir(tmp_path)
    method = find("mtp")
    checkpoints.save(method.random(llm.target, build_options(method.Options, {}), 5).weights(), Path("heads/monday"))
    with running(llm, name="embedded", pools=Pools(2**20), heads=Heads(llm), admin_key="SECRET") as server:
        answer = curl(server, line)
    assert answer.status_code == 200, answer.text


@pytest.mark.quick("page1")
@pytest.mark.parametrize("page", [README, SERVING])
def test_the_client_of_the_pages(
    embedded: Running, page: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newcomer copies the block in Python, which is run as it stands, on the port of the test."""
    code = next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "OpenAI" in block)
    client = embedded.client()
    monkeypatch.setattr(openai, "OpenAI", lambda **_: client)
    exec(compile(code, "page", "exec"), {})
    printed = capsys.readouterr().out.strip()
    assert len(printed) > 5
    assert page is SERVING or f"`{printed}`" in page, "the README says what the model answers"


def test_metrics_of_the_pages(embedded: Running) -> None:
    """The table and the dashboard name no metric that the server does not have."""
    embedded.post("/v1/completions", {"prompt": "Hello", "max_tokens": 8, "ignore_eos": True, "temperature": 0})
    shown = embedded.get("/metrics").text
    known = {re.split(r"[{ ]", line)[0] for line in shown.splitlines() if line and line[0] != "#"}
    known |= {name.removesuffix("_count") for name in known}
    dashboard = json.loads((ROOT / "deploy" / "grafana_dashboard.json").read_text())
    asked = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    assert {*re.findall(r"(?:vllm|eyas):\w+", SERVING + asked)} <= known
