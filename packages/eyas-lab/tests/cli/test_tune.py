"""`eyas tune`, and `--tree auto` from the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from command_line import last_json
from eyas import passes

Run = Callable[..., Any]


@pytest.fixture(autouse=True)
def _quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(passes, "REPEATS", 1)


TUNE = ("tune", "--target", "llama", "--draft", "head")


@pytest.mark.slow
def test_tune_measures_once_and_says_where(run: Run, tmp_path: Path) -> None:
    """Bugs: it measures again what is known, or does not when it is told to; a pipe gets something
    else than one JSON object."""
    found = [json.loads(run(*TUNE, "--json", *more).stdout) for more in ((), (), ("--force",))]
    assert [f["measured"] for f in found] == [True, False, True]
    first, second, _ = found
    assert first["costs"] == second["costs"]
    assert Path(first["file"]).is_file()
    assert Path(first["file"]).is_relative_to(tmp_path / "cache" / "eyas")
    assert (first["method"], first["costs"]["nodes"]) == ("eagle2", list(passes.NODES))
    assert set(first["tree"]) == {"nodes", "depth", "branch", "accepted", "tokens_per_second"}
    assert first["plain"]["tokens_per_second"] > 0


@pytest.mark.slow
def test_tune_for_people(run: Run) -> None:
    """Bug: a table that cannot be printed; the tree that pays most is not in it."""
    result = run(*TUNE, "--tree.nodes", 9, "--tree.depth", 3, "--tree.branch", 2)
    assert result.exit_code == 0, (result.output, result.exception)
    assert "branch" in result.stdout
    assert "nodes 9 depth" in result.stdout or "nodes 8 depth" in result.stdout
    assert "nodes 16" not in result.stdout, "larger than the user allows"
    assert "measured now: " in result.stderr


@pytest.mark.slow
def test_tune_refuses(refused: Callable[..., str]) -> None:
    """Bug: a method without sizes is measured for nothing, or ends in a traceback."""
    assert "suffix has no dynamic trees" in refused("tune", "--target", "llama", "--method", "suffix")
    assert "needs a trained head" in refused("tune", "--target", "llama", "--method", "eagle3")


@pytest.mark.exhaustive
def test_auto_is_what_nothing_said_means(answer: Callable[..., dict[str, Any]]) -> None:
    """Bugs: a tree that the user describes is changed; auto is not the default, says other ids, or
    grows beyond what was allowed."""

    def decided(*arguments: object, ids: str = "5,9,100") -> tuple[str, set[str], dict[str, Any]]:
        made = answer("--prompt-ids", ids, *arguments)
        return made["policy"], set(made["decisions"]), made

    (_, _, plain), (_, _, auto) = decided("--method", "vanilla"), decided("--draft", "head")
    assert (plain["policy"], auto["policy"]) == ("fixed", "auto")
    assert plain["decisions"] == {"fixed": plain["cycles"]}
    assert auto["token_ids"] == plain["token_ids"]
    assert sum(auto["decisions"].values()) == auto["cycles"]
    assert auto["decisions"]["plain"] >= 3
    for described in (("--tree.nodes", 9), ("--tree", "fixed")):
        assert decided("--draft", "head", *described)[:2] == ("fixed", {"fixed"})
    policy, within, _ = decided("--draft", "head", "--tree", "auto", "--tree.nodes", 3, "--tree.depth", 2)
    allowed = {f"{n}/{d}/{b}" for n in (2, 3) for d in (1, 2) for b in range(1, 11)}
    assert policy == "auto"
    assert within <= {"plain", "suffix", *allowed}
    assert decided("--method", "suffix", ids="5,9,5,9,5,9")[:2] == ("auto", {"plain", "fixed"})


@pytest.mark.exhaustive
def test_auto_and_a_useless_head_in_a_bench(run: Run, tmp_path: Path) -> None:
    """Bugs: `tree=auto` and `head=random` of a part of --methods are taken for options of the
    method, or do nothing; trees that do not grow are governed unasked, so that a slow method looks
    like plain decoding; simulated acceptance drives a policy."""
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text(json.dumps({"prompt_ids": [5, 9, 100, 3]}) + "\n")
    specs = (
        "eagle2", "eagle2:tree=fixed", "eagle2:head=random", "eagle2:tree.nodes=9", "eagle2:tree.depth=3:tree=auto", "suffix",
        "suffix:tree=auto", "medusa:head=random",
    )  # fmt: skip

    def bench(methods: str, output: str, *more: object) -> dict[str, Any]:
        command = ("bench", "--target", "llama", "--draft", "head", "--prompts", prompts, "--methods", methods)
        short = ("--max-new-tokens", 16, "--json")
        result = run(*command, *short, "--output", tmp_path / output, *more)
        assert result.exit_code == 0, (result.output, result.exception)
        return last_json(result)

    summary = bench(",".join(specs), "out")
    about = summary["settings"]["methods"]
    auto = {name for name, found in about.items() if found.get("policy") == "auto"}
    assert auto == {"eagle2", "eagle2:head=random", "eagle2:tree.depth=3:tree=auto", "suffix:tree=auto"}
    assert about["eagle2:head=random"]["head"] == "random"
    assert about["eagle2:head=random"]["weights"] != about["eagle2"]["weights"]
    assert all(row["equal"] for row in summary["rows"] if not row["method"].startswith("transformers"))
    about = bench("eagle2,eagle2:tree=auto", "sim", "--simulate-acceptance", "0.5")["settings"]["methods"]
    assert [about[name]["policy"] for name in ("eagle2", "eagle2:tree=auto")] == ["fixed", "auto"]
