"""The list of published heads, and `draft="auto"`, which looks there."""

import json
import re
from pathlib import Path

import pytest

import eyas
import hub
import zoo
from eyas import checkpoints, drafters, named
from eyas.core.options import build_options
from eyas.core.target import Target
from eyas.drafters import find
from eyas.errors import CheckpointError


def test_every_entry_is_whole() -> None:
    """Guards against an entry without a source, an id that is none, a method that does not exist,
    and one head listed twice."""
    content, heads = json.loads(named.FILE.read_text()), named.listed_heads()
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", content["read"])
    assert {entry["source"] for entry in content["heads"]} == set(content["sources"])
    left_out = {head for group in content["left_out"] for head in group["heads"]}
    assert not left_out & {entry["head"] for entry in content["heads"]}  # what is listed is not also refused
    for head in heads:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", head.target)
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", head.head)
        assert head.source.startswith("https://")
        assert any(find(name).head_format == head.method for name in drafters.names())
    assert len({(head.target, head.head) for head in heads}) == len(heads) > 40


def test_targets_are_found_by_their_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder of the hub's cache, and one that is called like a model, are that model; part of a
    name is not."""
    wanted = named.listed_heads("Qwen/Qwen3-8B")
    assert [head.target for head in wanted] == ["Qwen/Qwen3-8B"] * len(wanted) != []
    snapshot = tmp_path / "models--Qwen--Qwen3-8B" / "snapshots" / hub.COMMIT
    (tmp_path / "qwen3-8b").mkdir()
    for name in ("qwen/qwen3-8b", str(snapshot), str(tmp_path / "qwen3-8b")):
        assert named.listed_heads(name) == wanted
    page = (Path(__file__).parents[2] / "docs" / "reference" / "head_formats.md").read_text()
    exec(next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "listed_heads" in block), {})
    assert capsys.readouterr().out.count("https://") == len(wanted)
    for name in ("Qwen3-8B", "Qwen/Qwen3-8", str(tmp_path / "nothing" / "Qwen3-8B"), "", "embedded"):
        assert named.listed_heads(name) == []


@pytest.fixture
def listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """A target that a stand-in of the hub calls Qwen/Qwen3-8B, and two of the heads that are listed for it; the first one
    is damaged."""
    model, method = zoo.tiny("qwen3"), find("eagle1")
    model.save_pretrained(tmp_path / "target")
    first, second = [head.head for head in named.listed_heads("Qwen/Qwen3-8B")][:2]
    head = method.random(Target(model), build_options(method.Options, {}), 0)
    for name in ("good", "damaged"):
        checkpoints.save(head.weights(), tmp_path / name)
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"nothing")
    folders = {"Qwen/Qwen3-8B": tmp_path / "target", first: tmp_path / "damaged", second: tmp_path / "good"}

    def snapshot(hub_id: str, **more: object) -> str:
        if hub_id not in folders:
            raise OSError("not there")
        return str(folders[hub_id])

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    return folders


def test_what_is_taken_is_said(listed: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing listed, nothing readable, a method that none of the heads is for: never another draft
    without a word."""
    model = zoo.tiny("qwen3")
    with pytest.warns(UserWarning, match="draft auto: no head is listed for Qwen3ForCausalLM; took suffix"):
        assert eyas.load(model, draft="auto", tokenizer=False).method == "suffix"
    model.config._name_or_path = "Qwen/Qwen3-8B"
    model.name_or_path = "Qwen/Qwen3-8B"
    with pytest.warns(UserWarning, match=r"draft auto: took \S+, which https://\S+ .*lists for Qwen/Qwen3-8B"):
        llm = eyas.load(model, draft="auto", tokenizer=False)
    assert llm.draft_name == list(listed)[2]
    with pytest.warns(UserWarning, match="took prompt_lookup"):
        assert eyas.load(model, draft="auto", method="prompt_lookup", tokenizer=False).draft_name is None
    listed[list(listed)[2]] = listed[list(listed)[1]]
    with pytest.raises(CheckpointError, match=r"draft auto: .*\(and \d more listed heads fail\)") as caught:
        eyas.load(model, draft="auto", tokenizer=False)
    assert "\n" not in str(caught.value)


def test_families_and_base_models(tmp_path: Path) -> None:
    """Guards the order: heads for the model itself, for the one that it was made from, for its family; a family is told by
    the vocabulary too; each says why."""
    config = {"model_type": "qwen3", "vocab_size": 151936}
    exact = named.fitting_heads("Qwen/Qwen3-8B", config)
    assert [fit.of_family for fit in exact] == [False] * (len(exact) - 1) + [True]
    assert exact[-1].head.head == "amd/PARD-Qwen3-0.6B"
    tune = tmp_path / "my-tune"
    tune.mkdir()
    (tune / "README.md").write_text(
        "---\nlicense: mit\nbase_model:\n- Qwen/Qwen3-8B\n---\n# A fine-tune of meta-llama/Llama-3.1-8B\n"
    )
    inherited = named.fitting_heads(str(tune), config)
    assert [fit.head.head for fit in inherited] == [fit.head.head for fit in exact]
    assert inherited[0].why.endswith(f"lists for Qwen/Qwen3-8B, from which {tune} was made")
    assert "models of type qwen3 with this vocabulary" in inherited[-1].why
    saved_as = {**config, "_name_or_path": "Qwen/Qwen3-8B"}
    assert [fit.head.head for fit in named.fitting_heads("me/tuned", saved_as)] == [fit.head.head for fit in exact]
    assert named.fitting_heads("me/other", {"model_type": "qwen3", "vocab_size": 160}) == []
