"""The commands of README, docs/start and docs/guide run as they are written, on models that are small enough for a
test. Numbers that only cost time are made smaller. ELSEWHERE names the tests of commands that need more, and BY_HAND the
few lines that no test runs."""

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from PIL import Image
from transformers import AutoTokenizer, LlamaForCausalLM, LlavaForConditionalGeneration

import eyas
import processes
import zoo
from command_line import Run, embedded, run, world  # noqa: F401  # fixtures
from eyas import checkpoints
from eyas.cli._app import parse
from eyas.core.options import build_options
from eyas.core.target import Target
from eyas.drafters import find
from eyas.serve import server
from gguf_models import TOKENS, write_gguf
from media_models import with_processor
from test_public import PAGES, commands_of, shell_lines

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")]

ROOT = Path(__file__).parents[1]
ELSEWHERE = {  # a pattern of commands, and the file whose tests run such commands
    r"--(workers|replicas) ": "packages/eyas-ray/tests",
    r"^accelerate ": "packages/eyas-train/tests/cli/test_accelerate.py",
    r"^audit .*--(url|self-test|assistant) |^audit .*--self-test|embedded": "packages/eyas-lab/tests/cli/test_audit.py",
    r"^bench$|^bench --(compare|methods)|speed_bench": "packages/eyas-lab/tests/cli/test_bench.py",
    r"--metrics ": "packages/eyas-lab/tests/cli/test_examine.py",
}
PROGRAMS = {  # lines of other programs, and the file whose tests run them
    r"^(vllm|guidellm|aiperf|llama-benchy) ": "tests/clients/test_benchmarks.py",
    r"^export RAY_SERVE_|^serve deploy |^RAY_ADDRESS=": "packages/eyas-ray/tests/test_deploy.py",
    r"^python runs/gpu.py ": "tests/test_runs.py",
}
BY_HAND = {  # lines that need what a test does not have
    r"^(mkdir speed_bench|curl -LsSf https:)": "data from the internet",
    r"gptqmodel|^pip install (device-smi|accelerate|torchao|--no-deps optimum)": "packages of others",
    r"^dflash |^ANTHROPIC_BASE_URL=": "data sets from a hub; a large model",
    r"^git clone URL": "a public address, which does not exist yet",
    r"^docker build ": "a daemon that makes images; tests/test_packaging.py reads the Dockerfile",
}
SMALLER = {"--minutes": "0.02", "--device": "cpu", "--dtype": "float32", "--head.kv-heads": "2", "--rows": "2"}
STAND_INS = {"/srv/models/target": "MODEL", "/srv/models/head": "HEAD", "smollm2": "MODEL"}
FEWER = {
    "generate": ["--max-new-tokens", "4"],
    "bench": ["--methods", "suffix,eagle3", "--limit", "1", "--max-new-tokens", "4"],
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
    AutoTokenizer.from_pretrained(world / "llama").save_pretrained("FOLDER")
    for name in ("prompts", "mine"):
        Path(f"{name}.jsonl").write_text("\n".join(lines))
    Path("mine.txt").write_text("what is 1?\nwhat is 2?\n")
    turns = [{"role": "user", "content": "what is 1?"}, {"role": "assistant", "content": "it is 11111111 and 1"}]
    Path("own.jsonl").write_text("\n".join([json.dumps({"messages": turns})] * 12))
    write_gguf(Path("model.gguf"), tokens=TOKENS)
    Path("HUB").mkdir()
    for name in ("TARGET.gguf", "HUB/model-Q8_0.gguf"):
        Path(name).symlink_to(tmp_path / "model.gguf")
    read = eyas.load("model.gguf", "suffix", kernels="off").target
    checkpoints.save(method.random(read, build_options(method.Options, shape), 1).weights(), Path("GGUF_HEAD"))
    images = Target(LlavaForConditionalGeneration.from_pretrained(with_processor(Path("IMAGES"))))
    checkpoints.save(method.random(images, build_options(method.Options, shape), 1).weights(), Path("IMAGES_HEAD"))
    Image.new("RGB", (20, 12)).save("cat.png")
    Path("schema.json").write_text('{"enum": ["1", "2"]}')
    layers = {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(zoo.LAYERS)}
    others = dict.fromkeys(["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"], "cpu")
    Path("map.json").write_text(json.dumps({**layers, **others}))
    return tmp_path


def shortened(arguments: list[str]) -> list[str]:
    """The command with smaller numbers, and with the stand-ins of other folders."""
    words = [SMALLER.get(before, word) for before, word in zip(["", *arguments], arguments, strict=False)]
    if "--image" in words:
        stand_ins = {"MODEL": "IMAGES", "HEAD": "IMAGES_HEAD"}
    elif "TARGET.gguf" in words:
        stand_ins = {"HEAD": "GGUF_HEAD"}
    elif words[0] == "generate" and "Qwen/Qwen3-8B" in words:  # heads of the hub: tests/named
        stand_ins = {"Qwen/Qwen3-8B": "MODEL", "auto": "HEAD"}
    else:
        stand_ins = STAND_INS
    words = [stand_ins.get(word, word) for word in words]
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


def options_of(line: str) -> list[str]:
    return re.findall(r"(?<=\s)--[a-z][\w.-]*", line)


def test_the_other_commands_have_tests() -> None:
    """Guards the list of commands that run elsewhere: each has a test there, which gives all of its options."""
    lines = [shlex.join(arguments) for page in PAGES for arguments in commands_of(page)]
    for pattern, place in ELSEWHERE.items():
        tests = text_of(place)
        chosen = [line for line in lines if re.search(pattern, line)]
        assert chosen, pattern
        missing = {(line, option) for line in chosen for option in options_of(line) if option not in tests}
        assert not missing, (place, missing)


def text_of(place: str) -> str:
    """The text of a file of tests, or of all in a folder."""
    files = [ROOT / place] if place.endswith(".py") else [*(ROOT / place).glob("test_*.py")]
    text = "\n".join(file.read_text() for file in files)
    assert "\ndef test_" in text, place
    return text


def test_every_line_has_its_test() -> None:
    """Bug: a page shows a line of a shell that nobody runs. Here make says what it would do, and pip what it would
    install; docker's arguments are read as the server's."""
    seen: set[str] = set()
    for line in dict.fromkeys(line for page in PAGES for line in shell_lines(page)):
        words = shlex.split(line)
        listed = next((pattern for pattern in PROGRAMS | BY_HAND if re.search(pattern, line)), None)
        if listed is not None:
            seen.add(listed)
            assert listed in BY_HAND or text_of(PROGRAMS[listed])
        elif words[0] == "make":
            said = processes.run(["make", "-n", *words[1:]], cwd=ROOT)
            assert said.returncode == 0, line
            assert re.search(r"(^|\s)\.venv[a-z-]*/bin/", said.stdout), line
        elif words[:2] == ["pip", "install"]:
            flags = ["--dry-run", "--no-index", "--no-deps", "--no-build-isolation", "--quiet"]
            done = processes.run([sys.executable, "-m", "pip", "install", *flags, *words[2:]], cwd=ROOT)
            assert done.returncode == 0, (line, done.stderr)
        elif words[:2] == ["docker", "run"]:
            image = next(i for i, word in enumerate(words) if re.fullmatch("eyas-(cpu|cuda)", word))
            parse(["serve", *words[image + 1 :]])
        elif words[0] == "curl":
            assert words[1].startswith("http://127.0.0.1:8000/"), "tests/serve/test_docs.py sends it"
        else:
            assert re.match(r"(?:[A-Z_]+=\S+ )*(?:\S*/)?eyas [a-z]", line), f"no test runs this line: {line}"
    assert seen == {*PROGRAMS, *BY_HAND}
