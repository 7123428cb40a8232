"""The commands of README, docs/start and docs/guide run as they are written, on models that are small enough for a
test. Numbers that only cost time are made smaller, and ELSEWHERE names the test of each command that needs more."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM

import zoo
from command_line import Run, embedded, run, world  # noqa: F401  # fixtures
from eyas import checkpoints
from eyas.core.options import build_options
from eyas.core.target import Target
from eyas.drafters import find
from eyas.serve import server
from test_public import PAGES, commands_of

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")]

ROOT = Path(__file__).parents[1]
ELSEWHERE = {  # a pattern of commands, and the file whose tests run such commands
    r"--(workers|replicas) ": "packages/eyas-ray/tests/test_ray.py",
    r"^accelerate ": "packages/eyas-train/tests/cli/test_accelerate.py",
    r"^audit .*--(url|self-test|assistant) |^audit .*--self-test|embedded": "packages/eyas-lab/tests/cli/test_audit.py",
    r"^bench$|^bench --(compare|methods)|speed_bench": "packages/eyas-lab/tests/cli/test_bench.py",
    r"--metrics ": "packages/eyas-lab/tests/cli/test_examine.py",
    r"--image ": "tests/cli/test_images.py",
    r"--gguf-file|\.gguf": "tests/targets/test_quantised.py",
    r"smollm2": "tests/named/test_named.py",
    r"Qwen/Qwen3-8B --draft auto": "tests/named/test_listed.py",
}
SMALLER = {"--minutes": "0.02", "--device": "cpu", "--dtype": "float32", "--head.kv-heads": "2", "--rows": "2"}
FEWER = {
    "generate": ["--max-new-tokens", "4"],
    "bench": ["--methods", "suffix,eagle3", "--limit", "1", "--max-new-tokens", "4", "--probe", "0"],
    "audit": ["--tokens", "40", "--sampling", "1", "--max-new-tokens", "4"],
    "examine": ["--max-new-tokens", "8"],
    "regenerate": ["--limit", "2", "--max-new-tokens", "4"],
    "train": ["--batch-tokens", "256", "--max-length", "64", "--head.layers", "0,2,3"],
    "serve": ["--port", "0"],
}
STATUSES = {"audit": (0, 3), "examine": (0, 1)}  # too few tokens; a head without training


@pytest.fixture
def folder(world: Path, embedded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:  # noqa: F811
    """The current folder, with everything that the pages name: MODEL, HEAD, FOLDER, prompts.jsonl, ..."""
    monkeypatch.chdir(tmp_path)
    for name in ("MODEL", "TARGET"):
        Path(name).symlink_to(world / "llama")
    method, shape = find("eagle3"), {"head.draft_vocab": 24, "head.layers": (0, 2, 3)}
    head = method.random(Target(zoo.FAMILIES["llama"]()), build_options(method.Options, shape), 1)
    for name in ("HEAD", "my_head"):
        checkpoints.save(head.weights(), Path(name))
    for name in ("FOLDER", "FOLDER2"):
        lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
        get_peft_model(LlamaForCausalLM.from_pretrained(world / "llama"), lora).save_pretrained(name)
    lines = [json.dumps({"prompt": f"what is {i}?"}) for i in range(40)]
    for name in ("prompts", "mine"):
        Path(f"{name}.jsonl").write_text("\n".join(lines))
    Path("mine.txt").write_text("what is 1?\nwhat is 2?\n")
    turns = [{"role": "user", "content": "what is 1?"}, {"role": "assistant", "content": "it is 11111111 and 1"}]
    Path("own.jsonl").write_text("\n".join([json.dumps({"messages": turns})] * 12))
    layers = {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(zoo.LAYERS)}
    others = dict.fromkeys(["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"], "cpu")
    Path("map.json").write_text(json.dumps({**layers, **others}))
    return tmp_path


def shortened(arguments: list[str]) -> list[str]:
    """The command with smaller numbers, and with the stand-ins of other folders."""
    words = [SMALLER.get(before, word) for before, word in zip(["", *arguments], arguments, strict=False)]
    words = [{"/srv/models/target": "MODEL", "/srv/models/head": "HEAD"}.get(word, word) for word in words]
    for i, before in enumerate(words[:-1], 1):
        if before == "--target" and words[i] == "FOLDER":  # a quantised target there, an adapter elsewhere
            words[i] = "MODEL"
        if before == "--output" and words[0] in ("export", "regenerate", "train"):
            words[i] = f"new_{words[i]}"
    return [*words, *FEWER.get(words[0], [])]


@pytest.mark.parametrize("page", [page for page in PAGES if commands_of(page)], ids=lambda page: page.stem)
def test_commands_run(page: Path, folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Bug: a page shows a command that ends with an error."""
    started: list[Any] = []

    def served(app: object, service: Any, listening: Any, **_: object) -> None:
        started.append(service.settings.name)
        service.stop()
        listening.close()

    monkeypatch.setattr(server, "serve", served)
    servers = 0
    for arguments in commands_of(page):
        if any(re.search(pattern, shlex.join(arguments)) for pattern in ELSEWHERE):
            continue
        result = run(*shortened(arguments))
        assert result.exit_code in STATUSES.get(arguments[0], (0,)), (arguments, result.output[-800:], result.exception)
        servers += arguments[0] == "serve"
    assert len(started) == servers


def test_the_other_commands_have_tests() -> None:
    """Guards the list of commands that run elsewhere: each pattern has a command, and its file has tests."""
    lines = [shlex.join(arguments) for page in PAGES for arguments in commands_of(page)]
    for pattern, file in ELSEWHERE.items():
        assert "\ndef test_" in (ROOT / file).read_text(), file
        assert any(re.search(pattern, line) for line in lines), pattern
