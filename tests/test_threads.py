"""One model, several Python threads: each answer is the one that a single thread gets. Random programs of calls run
first alone and then in several threads, which Python switches as often as it can."""

import random
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import eyas
import zoo
from eyas.api import LLM
from eyas.core.options import build_options
from eyas.core.target import Target
from eyas.drafters import find
from eyas.errors import EyasError, InputError
from eyas.targets.loading import target_of
from toy_tokenizer import VOCAB, byte_tokenizer

# of PEFT, about transformers
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

THREADS = 3
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": VOCAB}


@pytest.fixture(autouse=True)
def _switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@dataclass(frozen=True)
class Shared:
    """LLMs of one model. `adapters`: names that requests ask for."""

    model: PreTrainedModel
    llms: tuple[LLM, ...]
    adapters: tuple[str | None, ...] = (None,)


def llm_of(target: Target, method: str, **options: Any) -> LLM:
    kind = find(method)
    return LLM(target, kind.random(target, build_options(kind.Options, options), seed=1), byte_tokenizer())


@cache
def heads() -> Shared:
    """EAGLE-3 reads features of inner layers by hooks; the second LLM sets hooks of its own on the same layers."""
    model = zoo.tiny("llama", **SIZES, seed=1)
    inner = {"head.layers": (0, 2, 3)}
    return Shared(model, (llm_of(Target(model), "eagle3", **inner), llm_of(Target(model), "eagle1")))


@cache
def hybrid() -> Shared:
    """State modules run by a replaced forward."""
    layers = ["linear_attention", "full_attention"] * (zoo.LAYERS // 2)
    model = zoo.tiny("qwen3_5_text", layer_types=layers, vocab_size=VOCAB, **zoo.DELTA_NET)
    return Shared(model, (llm_of(Target(model), "suffix"), llm_of(Target(model), "vanilla")))


@cache
def kernels() -> Shared:
    """Compiled kernels beside the model's own forward."""
    pytest.importorskip("eyas.kernels")
    model = zoo.tiny("llama", **SIZES, seed=2)
    by_kernels = eyas.load(model, method="suffix", tree="fixed", tokenizer=byte_tokenizer(), kernels="on")
    return Shared(model, (by_kernels, llm_of(by_kernels.target, "eagle2"), llm_of(Target(model), "suffix")))


@cache
def adapters() -> Shared:
    peft = pytest.importorskip("peft", reason="adapters need the extra peft")
    tuned = None
    for seed, name in enumerate(("one", "two")):
        torch.manual_seed(seed)
        config = peft.LoraConfig(r=4, init_lora_weights=False, lora_alpha=16, target_modules=["q_proj", "down_proj"])
        if tuned is None:
            tuned = peft.get_peft_model(zoo.tiny("llama", **SIZES, seed=3), config, adapter_name=name)
        else:
            tuned.add_adapter(name, config)
    target = target_of(tuned.eval())
    return Shared(target.model, (llm_of(target, "suffix"), llm_of(target_of(tuned), "eagle2")), ("one", "two", "base"))


KINDS: dict[str, Callable[[], Shared]] = {"heads": heads, "hybrid": hybrid, "kernels": kernels, "adapters": adapters}


def ids(rng: random.Random) -> list[int]:
    return [rng.randrange(6, VOCAB) for _ in range(rng.choice((3, 8, 21)))]


def keywords(shared: Shared, rng: random.Random) -> dict[str, Any]:
    sampled = {"temperature": 0.9, "seed": rng.randrange(99)} if rng.random() < 0.3 else {}
    length = {"max_new_tokens": rng.randrange(3, 13), "ignore_eos": True}
    return {**length, "adapter": rng.choice(shared.adapters), **sampled}


def generate(shared: Shared, llm: LLM, rng: random.Random) -> Any:
    prompts = [ids(rng) for _ in range(rng.choice((1, 1, 3)))]
    results = llm.generate(prompts, batch_size=rng.choice((1, 2)), **keywords(shared, rng))
    return [result.token_ids for result in results]


def streamed(shared: Shared, llm: LLM, rng: random.Random) -> Any:
    """A stream that is read to its end, closed, or dropped; another call of the same thread comes in between."""
    stream, pieces, tokens = llm.stream(ids(rng), **keywords(shared, rng)), rng.choice((1, 2, 99)), list[int]()
    between = generate(shared, llm, rng) if rng.random() < 0.5 else None
    for _, piece in zip(range(pieces), stream, strict=False):
        tokens += piece.token_ids
    if rng.random() < 0.5:
        stream.close()
    return tokens, between


def some(shared: Shared, llm: LLM, rng: random.Random) -> Any:
    """A generator that is dropped when its first answers are there."""
    prompts = [ids(rng) for _ in range(3)]
    answers = llm.generate_each(prompts, 2, **keywords(shared, rng))
    return [(number, result.token_ids) for (number, result), _ in zip(answers, range(rng.choice((1, 2))), strict=False)]


def chat(shared: Shared, llm: LLM, rng: random.Random) -> Any:
    chat, told = llm.chat("Be brief."), []
    for _ in range(2):
        settings = {**keywords(shared, rng), "max_new_tokens": 6}
        stream = chat.stream(f"Question {rng.randrange(9)}?", **settings)
        told.append([token for piece in stream for token in piece.token_ids])
    return told


def fails(shared: Shared, llm: LLM, rng: random.Random) -> Any:
    """A processor of the caller that fails after a few tokens: the next call finds everything usable."""

    def processor(text: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if text.shape[1] > 5:
            raise KeyError("no such text")
        return scores

    with pytest.raises(EyasError, match="no such text"):
        llm.generate(ids(rng)[:3], logits_processor=processor, max_new_tokens=9, ignore_eos=True)
    return "failed"


def asks_itself(shared: Shared, llm: LLM, rng: random.Random) -> Any:
    """A processor that asks the LLM that is calling it."""
    prompt, settings, inner = ids(rng), keywords(shared, rng), []

    def processor(text: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not inner:
            inner.append(llm.generate(prompt[:2], **settings).token_ids)
        return scores

    return llm.generate(prompt, logits_processor=processor, **settings).token_ids, inner


def own_forward(shared: Shared, llm: LLM, rng: random.Random) -> Any:
    """The model's owner calls it, too; which adapter is on is then the owner's to know."""
    tokens = torch.tensor([ids(rng)])
    with torch.no_grad():
        return shared.model(tokens).logits[0].argmax(-1).tolist() if shared.adapters == (None,) else None


OPERATIONS = (generate, generate, streamed, streamed, some, chat, fails, asks_itself, own_forward)


def program(shared: Shared, seed: int, calls: int) -> list[Any]:
    """Make random calls; return the answers, or the first error."""
    rng, answers = random.Random(seed), list[Any]()
    for _ in range(calls):
        operation, own = rng.choice(OPERATIONS), random.Random(rng.random())
        try:
            answers.append((operation.__name__, operation(shared, rng.choice(shared.llms), own)))
        except Exception as error:
            return [*answers, (operation.__name__, repr(error))]
    return answers


def compare(shared: Shared, first_seed: int, calls: int) -> None:
    seeds = range(first_seed, first_seed + THREADS)
    expected = [program(shared, seed, calls) for seed in seeds]
    assert all(len(answers) == calls for answers in expected), "a program fails alone"
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(lambda seed: program(shared, seed, calls), seeds))
    assert found == expected


@pytest.mark.slow
@pytest.mark.quick("heads")
@pytest.mark.parametrize("kind", KINDS)
def test_threads_get_their_own_answers(kind: str) -> None:
    """Bug: hooks, states, adapters or a Decoder of another thread: a crash, or wrong answers."""
    for seed in (0, 100):
        compare(KINDS[kind](), seed, 4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_a_fuzz_of_threads(kind: str) -> None:
    """The same with more programs: some 5 seconds for each kind of shared state."""
    for seed in range(1000, 1500 if kind == "kernels" else 1200, 100):
        compare(KINDS[kind](), seed, 6)


def test_two_threads_and_one_chat() -> None:
    """Guards turns of one conversation that run into each other: one is answered, or told that another is."""
    llm = heads().llms[0]
    chat, alone = llm.chat(), llm.chat()
    want = alone.send("Hello?", max_new_tokens=12, ignore_eos=True).token_ids

    def ask(_: int) -> Any:
        try:
            return chat.send("Hello?", max_new_tokens=12, ignore_eos=True).token_ids
        except InputError as error:
            return str(error)

    with ThreadPoolExecutor(THREADS) as pool:
        answers = list(pool.map(ask, range(THREADS)))
    told = [answer for answer in answers if not isinstance(answer, str)]
    assert want in told
    assert all("still being streamed" in answer for answer in answers if isinstance(answer, str))
    assert len(chat.messages) == 2 * len(told)
    assert [message["role"] for message in chat.messages] == ["user", "assistant"] * len(told)


def test_a_stream_that_several_threads_read() -> None:
    """Each piece goes to one of them, and the text is whole."""
    llm = heads().llms[0]
    prompt = ids(random.Random(5))
    want = llm.generate(prompt, max_new_tokens=40, ignore_eos=True)
    stream = llm.stream(prompt, max_new_tokens=40, ignore_eos=True)
    with ThreadPoolExecutor(THREADS) as pool:
        read = list(pool.map(lambda _: [piece.token_ids for piece in stream], range(THREADS)))
    assert sorted(token for pieces in read for piece in pieces for token in piece) == sorted(want.token_ids)
    assert stream.result().text == want.text
    assert stream.result().token_ids == want.token_ids


@pytest.mark.slow
def test_a_model_that_is_attached_and_loaded() -> None:
    """`model.generate` by eyas in one thread, an LLM of the same model in others."""
    pytest.importorskip("eyas.hooks")
    shared = heads()
    prompt = torch.tensor([ids(random.Random(6))])
    settings = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(prompt)}
    want: Any = shared.model.generate(prompt, **settings)
    with eyas.attach(shared.model, method="suffix", tree="fixed"), ThreadPoolExecutor(THREADS) as pool:
        attached = [pool.submit(shared.model.generate, prompt, **settings) for _ in range(6)]
        programs = [pool.submit(program, shared, seed, 3) for seed in range(THREADS)]
        assert all(torch.equal(future.result(), want) for future in attached)
        found = [future.result() for future in programs]
    assert found == [program(shared, seed, 3) for seed in range(THREADS)]
