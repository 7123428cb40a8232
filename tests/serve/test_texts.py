"""Through the server, texts equal those of `LLM.generate` byte by byte: alone and among others,
streamed and not, for every method, for hybrid targets and for layers on several devices."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import openai
import pytest
import torch

import eyas
import zoo
from eyas import tiny
from eyas.serve.pool import Methods
from serving import PROMPTS, Running, running, small_llm

NEW = 20
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": 4},
    {"temperature": 1.2, "min_p": 0.05, "repetition_penalty": 1.2, "seed": 5},
    {"temperature": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.3, "logit_bias": {"300": 2.0, "13": -100}, "seed": 6},
)  # fmt: skip
OWN = ("top_k", "min_p", "repetition_penalty")  # names that OpenAI's client does not know
HYBRIDS = {
    "lfm2": {"layer_types": zoo.CONV_THEN_ATTENTION},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, **zoo.MAMBA_1},
}


@dataclass(frozen=True)
class Case:
    """A request with the answer that it must get."""

    prompt: str
    sampling: dict[str, Any]
    text: str
    new: int


def cases_of(llm: eyas.LLM, samplings: Sequence[dict[str, Any]] = SAMPLINGS, new: int = NEW) -> list[Case]:
    """Four prompts, each continued in two ways, with each of these samplings."""
    prompts = [*PROMPTS, *(f"{prompt} Please be quick." for prompt in PROMPTS)]
    return [Case(p, s, llm.generate(p, max_new_tokens=new, **s).text, new) for p in prompts for s in samplings]


@pytest.fixture(scope="module")
def cases(llm: eyas.LLM) -> list[Case]:
    """40 requests."""
    return cases_of(llm)


async def answered(client: openai.AsyncOpenAI, case: Case, stream: bool, delay: float = 0.0, **extra: Any) -> str:
    """The text that the server gives."""
    await asyncio.sleep(delay)
    known = {name: value for name, value in case.sampling.items() if name not in OWN}
    extra |= {name: value for name, value in case.sampling.items() if name in OWN}
    options: dict[str, Any] = {"model": "tiny", "max_tokens": case.new, "extra_body": extra, **known}
    messages: Any = [{"role": "user", "content": case.prompt}]
    if stream:
        chunks = await client.chat.completions.create(messages=messages, stream=True, **options)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])
    whole = await client.chat.completions.create(messages=messages, **options)
    return whole.choices[0].message.content or ""


async def close_early(client: openai.AsyncOpenAI, prompt: str, delay: float) -> None:
    """Begin to read an answer and hang up."""
    await asyncio.sleep(delay)
    messages: Any = [{"role": "user", "content": prompt}]
    options: dict[str, Any] = {"model": "tiny", "max_tokens": 400, "temperature": 0.0, "stream": True}
    chunks = await client.chat.completions.create(messages=messages, **options)
    async for _ in chunks:
        break
    await chunks.close()


def compare(server: Running, cases: Sequence[Case], spread: float = 0.0, closers: bool = False, **extra: Any) -> None:
    """All cases at once, every second one streamed, begun within `spread` seconds; with `closers` among clients that
    hang up."""

    async def every() -> list[Any]:
        async with server.async_client() as client:
            delays = [spread * i / len(cases) for i in range(len(cases))]
            asked = [answered(client, c, bool(i % 2), delays[i], **extra) for i, c in enumerate(cases)]
            closed = [close_early(client, prompt, spread * i / 4) for i, prompt in enumerate(PROMPTS) if closers]
            return await asyncio.gather(*asked, *closed)

    for case, text in zip(cases, asyncio.run(every()), strict=not closers):
        assert text == case.text, case


@pytest.mark.slow
def test_alone(server: Running, cases: list[Case]) -> None:
    """One after another: the Decoder of a single row."""

    async def each() -> None:
        async with server.async_client() as client:
            for i, case in enumerate(cases[:8]):
                assert await answered(client, case, bool(i % 2)) == case.text

    asyncio.run(each())


@pytest.mark.cover(rows=1)
@pytest.mark.slow
@pytest.mark.parametrize("rows", [3, 16])  # one row: test_alone
def test_among_others(llm: eyas.LLM, cases: list[Case], rows: int) -> None:
    """40 at once, and again while they come and go: rows, chunks of prompts, reused prefixes and
    neighbours change no text."""
    with running(llm, rows=rows, prefill_budget=7) as server:
        compare(server, cases)
        compare(server, cases, spread=0.5)


# httpx's generator of a stream that the client closes early may be collected while it runs; the server is not concerned
@pytest.mark.exhaustive
@pytest.mark.filterwarnings(r"ignore:Exception ignored in. <async_generator object \w*Async\w*Stream")
@pytest.mark.parametrize("family", HYBRIDS)
def test_hybrids_among_others(family: str) -> None:
    """Guards the states of a hybrid target: requests that come and go, share prefixes and are closed early get the
    texts that they get alone."""
    tokenizer = tiny.tokenizer()
    model = zoo.tiny(family, vocab_size=len(tokenizer), max_position_embeddings=1024, **HYBRIDS[family])
    llm = eyas.load(model, method="self_speculative", skip="exit:2", depth=3, tokenizer=tokenizer)
    cases = cases_of(llm, SAMPLINGS[:2], 12)
    with running(llm, rows=3, prefill_budget=7) as server:
        for _ in range(2):  # the second time behind kept prefixes
            compare(server, cases, spread=0.3, closers=True)


@pytest.mark.slow
def test_layers_on_several_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests share two rows, and get the texts of the model on one device. The devices are two names of the CPU, as
    those of `two_gpus` are known to one thread only."""
    pytest.importorskip("accelerate", reason="device maps need accelerate")
    from accelerate import dispatch_model

    from two_devices import halves

    tokenizer = tiny.tokenizer()
    whole = zoo.tiny("llama", vocab_size=len(tokenizer), max_position_embeddings=1024)
    cases = cases_of(eyas.load(whole, "suffix", tokenizer=tokenizer, kernels="off"), SAMPLINGS[:1])
    places = [torch.device("cpu", index) for index in range(2)]
    placed = {"check_layers": lambda layers: None,  # weights say "cpu", hooks "cpu:1"
              "devices_of": lambda cache: [places[k % 2] for k in range(len(cache.layers))]}  # fmt: skip
    for name, function in placed.items():
        monkeypatch.setattr(f"eyas.targets.placement.{name}", function)
    monkeypatch.setattr("accelerate.hooks.set_module_tensor_to_device", lambda *_, **__: None)
    named = {name: f"cpu:{place}" for name, place in halves(whole).items()}
    model: Any = dispatch_model(whole, named, main_device="cpu:0", skip_keys=whole._skip_keys_device_placement)
    with pytest.warns(UserWarning, match="the kernels run whole models on one device"):
        llm = eyas.load(model, "suffix", tokenizer=tokenizer, kernels="on")
    assert list(llm.target.open(1).cache.bytes_by_device(1)) == places
    with running(llm, rows=2) as server:
        compare(server, cases)


@pytest.mark.exhaustive
def test_every_method(llm: eyas.LLM, server: Running, cases: list[Case]) -> None:
    """The request chooses the method, and the text stays: all methods of the server at once, on the
    rows of one engine.

    Methods whose children are drawn at random give another sample of the same distribution: greedy
    requests only. REST needs a datastore.
    """
    methods = Methods(llm)
    for method in [name for name in (*methods.names, False) if name != "rest"]:
        drawn = isinstance(method, str) and methods.drafter(method).samples_children
        asked = [case for case in cases[:5] if not drawn or case.sampling["temperature"] == 0]
        compare(server, asked, drafting=method)


@pytest.mark.exhaustive
def test_the_adaptive_default(llm: eyas.LLM, cases: list[Case]) -> None:
    """With --tree auto drafts come and go by the clock; the text does not."""
    with running(small_llm(tree="auto"), rows=4) as server:
        compare(server, cases[::2])
