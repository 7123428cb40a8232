"""What `tests/test_wings.py` runs in a copy of eyas that holds one wing, before tests of that wing."""

import importlib
import os
import pkgutil
from pathlib import Path

import pytest

import eyas
from eyas.core import sockets
from test_architecture import WINGS

WING = os.environ.get("EYAS_WING", "")


def test_the_wing_is_alone() -> None:
    """Every module of the wing can be imported, nothing of another one is there, its plugs are found."""
    package = Path(eyas.__file__).parent
    others = {folder for wing, folders in WINGS.items() if wing != WING for folder in folders}
    assert not others & {entry.stem for entry in package.iterdir()}
    for folder in sorted(WINGS[WING]):
        home = importlib.import_module(f"eyas.{folder}")
        for module in pkgutil.walk_packages(getattr(home, "__path__", []), f"eyas.{folder}."):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                if (error.name or "").partition(".")[0] == "eyas":
                    raise
        for plug in (package / folder).glob("plug_*.py"):
            socket = getattr(sockets, plug.stem.removeprefix("plug_").upper())
            assert importlib.import_module(f"eyas.{folder}.{plug.stem}") in socket.plugs


def tiny_llm() -> eyas.LLM:
    """A model with random weights, without a policy."""
    import toy_tokenizer
    import zoo  # seconds, which most wings do not need

    model = zoo.tiny("llama", vocab_size=toy_tokenizer.VOCAB, eos_token_id=1)
    return eyas.load(model, tokenizer=toy_tokenizer.byte_tokenizer(), tree="fixed")


@pytest.mark.skipif(WING != "serve", reason="of the server")
def test_the_server_answers() -> None:
    """Guards the way from a body to an answer, which passes most modules of the server."""
    from serving import running

    llm = tiny_llm()
    with running(llm) as server:
        made = server.client().completions.create(model="tiny", prompt="Hello", max_tokens=8, temperature=0)
    assert made.choices[0].text == llm.generate("Hello", max_new_tokens=8, raw=True).text


@pytest.mark.skipif(WING != "recall", reason="of texts of earlier requests")
def test_an_earlier_text_is_drafted() -> None:
    """Guards what the wing is for: fewer cycles for a text that came before."""
    recall = importlib.import_module("eyas.recall")
    llm, pool = tiny_llm(), recall.Pool()
    prompt = llm.ids("Hello there", raw=True)
    text = llm.generate(prompt, max_new_tokens=24)
    pool.add([*prompt, *text.token_ids])
    again = llm.generate(prompt, max_new_tokens=24, features=(recall.Recalled(pool),))
    assert again.token_ids == text.token_ids
    assert again.stats.cycles < text.stats.cycles


@pytest.mark.skipif(WING != "pard", reason="of models with masks")
def test_a_model_with_masks_drafts() -> None:
    """Guards the way from a method to a text."""
    drafters, llm = importlib.import_module("eyas.drafters"), tiny_llm()
    prompt = llm.ids("Hello there", raw=True)
    method = drafters.find("pard").random(llm.target)
    drafted = eyas.load(llm.target.model, method, tokenizer=False).generate(prompt, max_new_tokens=24)
    assert drafted.token_ids == llm.generate(prompt, max_new_tokens=24).token_ids
