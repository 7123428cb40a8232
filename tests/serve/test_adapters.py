"""Adapters of PEFT as models of the server: clients choose one by `model`, beside each other in one load."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

import eyas
from eyas import tiny
from serving import PROMPTS, TREE, running

peft = pytest.importorskip("peft", reason="adapters need the extra peft")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),  # of PEFT, about transformers
    pytest.mark.filterwarnings("ignore:.*trained for embedded alone:UserWarning"),
]


def adapter_folder(folder: Path, seed: int) -> str:
    """A random LoRA adapter of the embedded model, strong enough to change its texts."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = peft.LoraConfig(
            target_modules=["q_proj", "down_proj"], r=4, lora_alpha=4, init_lora_weights=False, task_type="CAUSAL_LM"
        )
        peft.get_peft_model(tiny.model(), config).save_pretrained(folder, save_embedding_layers=False)
    return str(folder)


@pytest.mark.exhaustive
def test_requests_choose_by_model(tmp_path: Path) -> None:
    """Guards the way from `model` to the adapter, with several in flight at once: each text is that
    of the same adapter merged or unmerged and alone, the default is the base model, and an unknown
    name is refused with the names that there are."""
    folders = {name: adapter_folder(tmp_path / name, seed) for seed, name in enumerate(("poet", "clerk"))}
    llm, plain = eyas.load(adapter=folders, tree=TREE), eyas.load(kernels="off", tree=TREE)
    names = {"tiny": "base", **{name: name for name in folders}}
    asked = [(model, prompt) for prompt in PROMPTS for model in names]
    expected = [llm.generate(prompt, adapter=names[model], max_new_tokens=16).text for model, prompt in asked]
    assert expected[::3] == [plain.generate(prompt, max_new_tokens=16).text for prompt in PROMPTS]
    assert len({tuple(expected[place::3]) for place in range(3)}) == 3
    with running(llm) as server:
        client = server.client()
        listed = [(model.id, getattr(model, "parent", None)) for model in client.models.list().data]
        assert listed == [("tiny", None), ("poet", "tiny"), ("clerk", "tiny")]
        assert client.models.retrieve("clerk").id == "clerk"

        def ask(one: tuple[str, str]) -> tuple[str, str | None]:
            message: Any = [{"role": "user", "content": one[1]}]
            answer = client.chat.completions.create(model=one[0], messages=message, max_tokens=16, temperature=0)
            return answer.model, answer.choices[0].message.content

        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(ask, asked)) == [
                (model, text) for (model, _), text in zip(asked, expected, strict=True)
            ]
        with pytest.raises(openai.NotFoundError, match="poet"):
            ask(("baker", PROMPTS[0]))
        body = {"model": "poet", "prompt": PROMPTS[0], "max_tokens": 4, "temperature": 0}
        made = [server.post("/v1/completions", {**body, **more}).json() for more in ({}, {"drafting": "vanilla"})]
        assert made[0]["choices"][0]["text"] == made[1]["choices"][0]["text"]
        assert made[1]["model"] == "poet"


def test_one_adapter_is_merged(tmp_path: Path) -> None:
    """Guards `--adapter FOLDER`: the merged weights run by kernels, where there are any, and the
    text is that of PEFT's own layers."""
    folder = adapter_folder(tmp_path / "poet", 0)
    merged, switched = eyas.load(adapter=folder, tree=TREE), eyas.load(adapter={"poet": folder}, tree=TREE)
    assert merged.adapters == ()
    assert switched.adapters == ("poet",)
    assert merged.target.runner.name == eyas.load(tree=TREE).target.runner.name
    for prompt in PROMPTS:
        text = switched.generate(prompt, adapter="poet", max_new_tokens=16).text
        assert merged.generate(prompt, max_new_tokens=16).text == text
    chat = switched.chat(max_new_tokens=8)
    first = chat.send(PROMPTS[0], adapter="poet")
    assert first.text == switched.generate(PROMPTS[0], adapter="poet", max_new_tokens=8).text
    second = chat.send(PROMPTS[1])  # another adapter's keys and values are no use: the whole conversation is read
    assert second.stats.cached_tokens == 0
    fresh = switched.generate([*chat.messages[:2], {"role": "user", "content": PROMPTS[1]}], max_new_tokens=8)
    assert second.text == fresh.text
