"""The trunk without its optional parts: each is hidden alone, and eyas still loads and decodes, or says what is missing."""

import json
import sys
from pathlib import Path

import pytest

import eyas
import processes
import toy_tokenizer
import zoo
from eyas.core.engine import Request
from reference import plain_decode

PACKAGE = Path(eyas.__file__).parent
# a hidden part -> how the one warning begins that says what else is left out with it
LEFT_OUT = dict.fromkeys(("adaptive", "features", "grammar", "named", "runners"), "")
LEFT_OUT["kernels"] = "eyas.runners.plug_runner is left out: No module named 'eyas.kernels'"
# what a hidden part alone can do -> what is said without it
REFUSED = {
    "runners": ({"weights": "int8"}, {}, "weights int8: no installed part of eyas serves this"),
    "kernels": ({"kernels": "on"}, {}, "kernels on: no installed part of eyas serves this"),
    "features": ({}, {"logprobs": 2}, "logprobs: no installed part of eyas serves this"),
    "grammar": ({}, {"regex": "[a-z]+"}, "regex: no installed part of eyas serves this"),
    "named": ({"target": None}, {}, "there is no embedded model in this installation"),
}
PROGRAM = """
import json, sys, warnings

folder, text, load, generate = sys.argv[1], sys.argv[2], *map(json.loads, sys.argv[3:])
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import eyas
    llm = eyas.load(folder, tree="auto")
    ids = llm.generate(text, max_new_tokens=24).token_ids
refusal = ""
try:
    changed = eyas.load(**{"target": folder, "tree": "fixed", **load})
    changed.generate(text, max_new_tokens=4, **generate)
except eyas.EyasError as error:
    refusal = str(error)
said = [str(w.message) for w in caught if "left out" in str(w.message)]
print(json.dumps({"file": eyas.__file__, "ids": ids, "policy": llm.policy is not None, "said": said, "refusal": refusal}))
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    zoo.tiny("llama", vocab_size=toy_tokenizer.VOCAB, eos_token_id=1).save_pretrained(folder)
    toy_tokenizer.byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.cover(hidden=1)
@pytest.mark.parametrize("hidden", LEFT_OUT)
def test_an_optional_part_is_missing(hidden: str, target: Path, tmp_path: Path) -> None:
    """Bug: a trunk needs its wings: with one folder gone the ids stay, and what needs it is refused in one line."""
    (tmp_path / "eyas").mkdir()
    for entry in PACKAGE.iterdir():
        if entry.name != hidden:
            (tmp_path / "eyas" / entry.name).symlink_to(entry)
    load, generate, refusal = REFUSED.get(hidden, ({}, {}, ""))
    arguments = [str(target), "Hello there", json.dumps(load), json.dumps(generate)]
    environment = processes.environment(PYTHONPATH=str(tmp_path))
    done = processes.run([sys.executable, "-c", PROGRAM, *arguments], True, env=environment)
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout.splitlines()[-1])
    assert Path(got["file"]).parent == tmp_path / "eyas"
    llm = eyas.load(target, "vanilla")
    expected = plain_decode(llm.target.model, Request(llm.ids("Hello there"), 24, eyas.Sampling(), llm.eos))
    assert got["ids"] == list(expected)
    assert got["policy"] == (hidden != "adaptive")
    assert bool(got["said"]) == bool(LEFT_OUT[hidden])
    assert any(LEFT_OUT[hidden] in said for said in got["said"]) or not LEFT_OUT[hidden]
    assert refusal in got["refusal"]
    assert bool(got["refusal"]) == bool(refusal)


DISTRIBUTION = {
    "my_method.py": "from eyas.drafters.suffix import Method as Suffix\n\nclass Method(Suffix):\n    pass\n",
    "my_format.py": "NAME = 'mine'\n\ndef recognises(config, names):\n    return False\n",
    "my_command.py": "GROUP = 'Answers'\n\ndef command() -> None:\n    'Say something.'\n    print('said')\n",
    "my_parts-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: my-parts\nVersion: 1.0\n",
    "my_parts-1.0.dist-info/entry_points.txt": "[eyas.methods]\nmine = my_method\n\n[eyas.formats]\nmine = my_format\n\n"
    "[eyas.commands]\nmine = my_command\n\n[eyas.parts]\nmine = my_format\n",
}
ASKED = """
import eyas
from eyas import drafters
from eyas import cli, elsewhere
from eyas.checkpoints._weights import formats

assert cli.run(["mine"]) == 0
assert elsewhere.part("mine", "a test").NAME == "mine"
assert "mine" in drafters.names() and drafters.find("mine").__module__ == "my_method"
assert "mine" in [getattr(form, "NAME", "") for form in formats()]
"""


@pytest.mark.slow
def test_what_other_distributions_register(tmp_path: Path) -> None:
    """Guards the way by which a command, method, format or part becomes a distribution: its entry point is enough."""
    for name, content in DISTRIBUTION.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    paths = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(PACKAGE.parent)!r}]\n"
    done = processes.run([sys.executable, "-c", paths + ASKED], warm=True)
    assert (done.returncode, "said" in done.stdout) == (0, True), done.stderr
