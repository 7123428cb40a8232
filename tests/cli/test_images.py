"""`eyas generate` with images: as an option, and in the messages of a file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import eyas
from media_models import with_processor

Run = Callable[..., Any]
FLAGS = ("--method", "suffix", "--max-new-tokens", 8, "--ignore-eos")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that reads images, and two images."""
    folder = tmp_path_factory.mktemp("images")
    with_processor(folder / "llava")
    for seed in range(2):
        Image.frombytes("RGB", (20, 12), bytes((seed * 90 + i * (seed + 1)) % 256 for i in range(720))).save(
            folder / f"{seed}.png"
        )
    return folder


def messages(*paths: Path) -> list[dict[str, Any]]:
    parts = [{"type": "image", "path": str(path)} for path in paths]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is this?"}]}]


@pytest.mark.slow
def test_images_as_an_option(run: Run, folder: Path) -> None:
    """Guards which images are read, in which order, with several answers too."""
    llm = eyas.load(folder / "llava", "suffix")
    ask = ("generate", "--target", folder / "llava", *FLAGS, "--json", "What is this?")
    texts = set()
    for paths in ((folder / "0.png",), (folder / "1.png",), (folder / "1.png", folder / "0.png")):
        made = run(*ask, *(flag for path in paths for flag in ("--image", path)))
        assert made.exit_code == 0, made.stderr
        expected = llm.generate(messages(*paths), max_new_tokens=8, ignore_eos=True)
        assert tuple(json.loads(made.stdout)["token_ids"]) == expected.token_ids
        texts.add(expected.text)
    assert len(texts) == 3
    first, second = json.loads(run(*ask, "--image", folder / "0.png", "--n", 2).stdout)["results"]
    assert first["token_ids"] == second["token_ids"]
    assert first["text"] in texts


@pytest.mark.slow
def test_images_in_a_file_of_prompts(run: Run, folder: Path) -> None:
    """Bug: only the token ids of these messages reached the engine, and the answers were about no image."""
    llm = eyas.load(folder / "llava", "suffix")
    prompts = [messages(folder / "0.png"), "What is this?", messages(folder / "1.png")]
    lines = [{"messages": prompt} if isinstance(prompt, list) else {"prompt": prompt} for prompt in prompts]
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in [*lines, {"messages": messages(folder / "no.png")}])
    )
    made = run("generate", "--target", folder / "llava", *FLAGS, "--input", folder / "prompts.jsonl", "--batch-size", 2)
    assert made.exit_code == 2
    assert "no.png" in made.stderr
    results = {result["line"]: result["text"] for result in map(json.loads, made.stdout.splitlines())}
    expected = [llm.generate(prompt, max_new_tokens=8, ignore_eos=True).text for prompt in prompts]  # type: ignore[arg-type]
    assert [results[line] for line in (1, 2, 3)] == expected
    assert len(set(expected)) == 3
