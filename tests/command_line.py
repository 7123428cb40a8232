"""The command, and models small enough for a test: a llama with a tokenizer of characters, and heads for it."""

import io
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import zoo
from eyas import checkpoints, cli, tiny
from eyas.core.target import Target
from eyas.drafters import eagle1

TEMPLATE = (
    "{% for m in messages %}{{ '<u>' if m['role'] == 'user' else '<a>' if m['role'] == 'assistant' else '<s>' }}{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ '</s>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<a>' }}{% endif %}"
)


@dataclass(frozen=True)
class Result:
    """How a command ended and what it printed."""

    exit_code: int
    stdout: str
    stderr: str
    output: str  # both, in the order of printing
    exception: BaseException | None = None


class _Stream(io.TextIOWrapper):
    """A standard stream in memory, which also writes into the common output."""

    def __init__(self, both: list[str]) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", write_through=True)
        self.both = both

    def write(self, text: str) -> int:
        self.both.append(text)
        return super().write(text)

    def text(self) -> str:
        self.flush()
        buffer = self.buffer
        assert isinstance(buffer, io.BytesIO)
        return buffer.getvalue().decode()


def invoke(arguments: Sequence[object], stdin: str | None = None) -> Result:
    """Run `eyas` in this process, with its standard streams in memory."""
    both: list[str] = []
    streams = sys.stdin, sys.stdout, sys.stderr
    sys.stdin = io.TextIOWrapper(io.BytesIO((stdin or "").encode()), encoding="utf-8")
    stdout, stderr = _Stream(both), _Stream(both)
    sys.stdout, sys.stderr = stdout, stderr
    status, escaped = 1, None
    try:
        status = cli.run([str(argument) for argument in arguments])
    except BaseException as error:
        escaped = error
    finally:
        sys.stdin, sys.stdout, sys.stderr = streams
    return Result(status, stdout.text(), stderr.text(), "".join(both), escaped)


Run = Callable[..., Result]


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character: six special ones, printable ASCII, then letters nobody types; as many as zoo.VOCAB."""
    pieces = ["<pad>", "<s>", "</s>", "<u>", "<a>", "<?>", "\n", *map(chr, range(32, 127))]
    pieces += [chr(0x400 + i) for i in range(zoo.VOCAB - len(pieces))]
    backend = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<?>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    words = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<?>",
        additional_special_tokens=["<u>", "<a>"],
    )  # fmt: skip
    words.chat_template = TEMPLATE
    return words


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `llama` (model and tokenizer), `bare` (no tokenizer), and `head`, an EAGLE head for both."""
    folder = tmp_path_factory.mktemp("world")
    model = zoo.FAMILIES["llama"]()
    for name in ("llama", "bare"):
        model.save_pretrained(folder / name)
    tokenizer().save_pretrained(folder / "llama")
    checkpoints.save(eagle1.Method.random(Target(model), seed=3).weights(), folder / "head")
    return folder


@pytest.fixture
def run(world: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command with these arguments. `llama`, `head` and `bare` stand for folders of the world."""

    def go(*arguments: object, stdin: str | None = None, env: dict[str, str] | None = None) -> Result:
        for name, value in (env or {}).items():
            monkeypatch.setenv(name, value)
        named = {name: str(world / name) for name in ("llama", "head", "bare")}
        return invoke([named.get(str(a), str(a)) for a in arguments], stdin)

    return go


@pytest.fixture
def refused(run: Run) -> Callable[..., str]:
    """The command must end with status 2 and one line on stderr; returns that line."""

    def go(*arguments: object, stdin: str | None = None) -> str:
        result = run(*arguments, stdin=stdin)
        assert result.exit_code == 2, (result.exit_code, result.output, result.exception)
        lines = result.stderr.strip().splitlines()
        assert len(lines) == 1, lines
        assert lines[0].startswith("eyas: error: ")
        return lines[0]

    return go


@pytest.fixture
def embedded(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The small llama stands in for the embedded model; returns its folder, with checksums."""
    from transformers import AutoTokenizer, LlamaForCausalLM

    from eyas.files import CHECKSUMS, sha256_of_folder

    folder = tmp_path / "weights"
    shutil.copytree(world / "llama", folder)
    shutil.copytree(world / "head", folder / "eagle1")
    (folder / CHECKSUMS).write_text(json.dumps(sha256_of_folder(folder)))
    monkeypatch.setattr(tiny, "FOLDER", folder)
    monkeypatch.setattr(tiny, "HEADS", {"eagle1": folder / "eagle1"})
    monkeypatch.setattr(tiny, "BEST", "eagle2")  # as the head of the world
    monkeypatch.setattr(tiny, "model", lambda: LlamaForCausalLM.from_pretrained(folder).eval())
    monkeypatch.setattr(tiny, "tokenizer", lambda: AutoTokenizer.from_pretrained(folder))
    return folder


def last_json(result: Result) -> dict[str, Any]:
    """Parses the last line of stdout."""
    found: dict[str, Any] = json.loads(result.stdout.strip().splitlines()[-1])
    return found


@pytest.fixture
def answer(run: Run) -> Callable[..., dict[str, Any]]:
    """`generate --json` on the small llama, for 24 tokens unless said otherwise."""

    def go(*arguments: object, stdin: str | None = None) -> dict[str, Any]:
        new = () if "--max-new-tokens" in arguments else ("--max-new-tokens", 24)
        result = run("generate", "--target", "llama", *new, "--json", *arguments, stdin=stdin)
        assert result.exit_code == 0, (result.output, result.exception)
        return last_json(result)

    return go


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """Forty chats and a broken line."""
    talks = [[("user", f"what is {i}"), ("assistant", "it is " + "1" * (i % 17))] for i in range(40)]
    lines = [json.dumps({"messages": [{"role": role, "content": text} for role, text in talk]}) for talk in talks]
    (tmp_path / "chat.jsonl").write_text("\n".join([*lines[:5], "{broken", *lines[5:]]))
    return tmp_path / "chat.jsonl"
