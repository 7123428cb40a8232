"""`custom_generate=eyas.hf(...)`: whatever generate is asked for, it returns and tells what it does without eyas."""

from collections import Counter
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
    StoppingCriteria,
)
from transformers.generation import BaseStreamer, GenerateDecoderOnlyOutput

import eyas
import zoo
from eyas.core.target import Target
from eyas.errors import EyasError
from hooks.conftest import PAD, padded
from reference import Oracle
from toy_tokenizer import VOCAB, byte_tokenizer

# transformers warns of default lengths and of settings that do not sample.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
FAMILIES = ("llama", "qwen3", "gemma3", "gpt2", "mixtral")
SETTINGS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.2, "min_new_tokens": 6},
    {"no_repeat_ngram_size": 3, "min_length": 20},
    {"sequence_bias": [[[7], 4.0], [[8, 9], -3.0]], "repetition_penalty": 0.8},
    {"suppress_tokens": [3, 4], "begin_suppress_tokens": [7], "forced_eos_token_id": 2, "renormalize_logits": True},
    {"encoder_repetition_penalty": 1.5, "encoder_no_repeat_ngram_size": 3, "bad_words_ids": [[7, 8], [40]]},
    {"exponential_decay_length_penalty": (3, 1.2), "eos_token_id": [2, 11, 150]},
]


def by_eyas(**options: Any) -> Any:
    return eyas.hf("suffix", tree="fixed", **options)


@pytest.mark.cover(family=2)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_ids_of_five_families(family: str) -> None:
    """Padding counted as text, a law applied in another order, or a cut at the wrong token changes an id."""
    model, batch = zoo.FAMILIES[family](), padded()
    prompts = [tuple(row[mask.bool()].tolist()) for row, mask in zip(*batch.values(), strict=True)]
    for settings in SETTINGS if family == "llama" else SETTINGS[:3]:
        asked = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": PAD, **settings}
        expected = model.generate(**batch, **asked)
        answers = dict(zip(prompts, expected[:, 9:].tolist(), strict=True))
        custom = eyas.hf(Oracle(Target(model), answers), batch_size=3 if family == "llama" else None)
        assert torch.equal(model.generate(**batch, **asked, custom_generate=custom), expected), settings
        assert all(sum(stats.accepted_lengths) > 3 for stats in custom.stats), "too little was drafted to show anything"


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.told: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.told.append(value.tolist())

    def end(self) -> None:
        self.told.append("end")


@pytest.mark.parametrize("rows", [1, 3])
def test_streamers_are_told_the_same(model: PreTrainedModel, rows: int) -> None:
    """transformers drops the streamer of a custom_generate and never ends it: whoever reads waits for ever."""
    batch = {name: value[:rows] for name, value in padded().items()}
    told = []
    for given, custom in ({}, None), ({}, by_eyas()), ({"inside": True}, None):
        streamer = Recorder()
        custom = by_eyas(streamer=streamer) if given else custom
        kept = {} if given else {"streamer": streamer}
        model.generate(**batch, max_new_tokens=12, pad_token_id=PAD, eos_token_id=19, custom_generate=custom, **kept)
        told.append(streamer.told)
    assert told[0] == told[1] == told[2]
    assert told[0][-1] == "end"
    assert len(told[0]) > 5
    with pytest.raises(EyasError, match="two streamers"):
        model.generate(**batch, streamer=Recorder(), custom_generate=by_eyas(streamer=Recorder()))


class Recording(StoppingCriteria):
    """Ends each row at its own length, as lm-eval's criteria do for a whole batch; keeps what it is called with."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths, self.seen = lengths, list[Any]()

    def __call__(self, input_ids: Tensor, scores: Any, **more: Any) -> Tensor:
        self.seen.append((input_ids.tolist(), scores is None))
        assert len(input_ids) == len(self.lengths)
        return torch.tensor([input_ids.shape[1] - 9 >= length for length in self.lengths])


@pytest.mark.parametrize("eos", [None, 19])
def test_criteria_are_called_as_transformers_calls_them(model: PreTrainedModel, eos: int | None) -> None:
    """Rows run ahead of each other; a criterion sees the batch token by token. Ended rows go on without EOS."""
    model.generation_config = GenerationConfig(pad_token_id=PAD, max_new_tokens=16)
    seen, answers = [], []
    for custom in (None, by_eyas()):
        criterion = Recording([3, 9, 5])
        asked = {"eos_token_id": eos, "stopping_criteria": [criterion], "custom_generate": custom}
        answers.append(model.generate(**padded(), **asked))
        seen.append(criterion.seen)
    assert torch.equal(*answers)
    assert seen[0] == seen[1]
    assert len(seen[0]) == 9
    late = by_eyas()
    model.generate(**padded(), max_time=1e-9, custom_generate=late)
    assert all(stats.cycles <= 1 for stats in late.stats), "the time is over after the first token"


def test_stop_strings(model: PreTrainedModel) -> None:
    """transformers drops the tokenizer before it makes the criterion, so eyas.hf brings both."""
    tokenizer, batch = byte_tokenizer(), {name: value[:1] for name, value in padded().items()}
    text = tokenizer.decode(model.generate(**batch, max_new_tokens=12, do_sample=False)[0, 9:])
    strings = [text[4:7]]
    expected = model.generate(**batch, max_new_tokens=12, stop_strings=strings, tokenizer=tokenizer)
    assert expected.shape[1] < 21
    custom = by_eyas(stop_strings=strings, tokenizer=tokenizer)
    assert torch.equal(model.generate(**batch, max_new_tokens=12, custom_generate=custom), expected)
    with pytest.raises(EyasError, match="tokenizer"):
        eyas.hf(stop_strings=strings)


@pytest.mark.quick("settings2")
@pytest.mark.parametrize("settings", [{}, {"do_sample": True, "temperature": 0.8, "top_k": 20}, SETTINGS[2]])
def test_scores_and_logits(model: PreTrainedModel, settings: dict[str, Any]) -> None:
    """Raw and processed scores belong to their tokens, though several come from one forward."""
    outputs = dict.fromkeys(("return_dict_in_generate", "output_scores", "output_logits"), True)
    asked = {"max_new_tokens": 12, "pad_token_id": PAD, **outputs, **settings}
    custom = by_eyas()
    torch.manual_seed(0)  # no text of this seed ends early
    ours = model.generate(**padded(), **asked, custom_generate=custom)
    assert type(ours) is GenerateDecoderOnlyOutput
    assert ours.past_key_values is None
    assert not ours.logits[0].is_inference()
    sampled = bool(settings.get("do_sample"))
    theirs = model.generate(**padded(), **asked) if not sampled else None
    with torch.no_grad():
        mask = torch.cat([padded()["attention_mask"], torch.ones(3, len(ours.logits), dtype=torch.long)], 1)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        full = model(ours.sequences, attention_mask=mask, position_ids=positions).logits[:, 8:-1]
    torch.testing.assert_close(torch.stack(ours.logits, 1), full, atol=2e-4, rtol=1e-3)
    if theirs is not None:
        assert torch.equal(theirs.sequences, ours.sequences)
        torch.testing.assert_close(torch.stack(ours.scores), torch.stack(theirs.scores), atol=2e-4, rtol=1e-3)
    chosen = torch.stack(ours.scores, 1).gather(2, ours.sequences[:, 9:, None])
    assert bool(chosen.isfinite().all()), "a token that its own scores exclude"
    only = model.generate(**padded(), max_new_tokens=2, return_dict_in_generate=True, custom_generate=custom)
    assert only.scores is None
    assert only.logits is None


@pytest.mark.slow
def test_sampled_texts_have_transformers_law(model: PreTrainedModel) -> None:
    """Pairs of tokens against exact probabilities, seeded; at 1.4 times the temperature p = 2e-4."""
    prompt, temperature, kept, count = padded()["input_ids"][:1], 1.4, 4, 600
    torch.manual_seed(3)
    asked = {"do_sample": True, "temperature": temperature, "top_k": kept, "max_new_tokens": 2}
    custom = by_eyas(batch_size=100)
    pairs = model.generate(prompt, **asked, num_return_sequences=count, custom_generate=custom)[:, 9:].tolist()

    @torch.no_grad()
    def law(*text: int) -> dict[int, float]:
        scores_V = model(torch.cat([prompt, torch.tensor([text], dtype=torch.long)], 1)).logits[0, -1] / temperature
        p_V = scores_V.masked_fill(scores_V < scores_V.topk(kept).values[-1], -torch.inf).softmax(-1)
        return {token: float(p_V[token]) for token in p_V.nonzero()[:, 0].tolist()}

    expected = {(first, second): p * q for first, p in law().items() for second, q in law(first).items()}
    drawn = Counter(map(tuple, pairs))
    assert drawn.keys() <= expected.keys()
    shares = [(drawn[pair], p * count) for pair, p in expected.items()]
    common, rare = [s for s in shares if s[1] >= 5], [s for s in shares if s[1] < 5]
    common += [tuple(map(sum, zip(*rare, strict=True)))] if rare else []
    drawn_counts, expected_counts = (torch.tensor(counts, dtype=torch.float64) for counts in zip(*common, strict=True))
    assert drawn_counts.sum() == count
    assert chisquare(drawn_counts, expected_counts * count / expected_counts.sum()).pvalue > 1e-3


@pytest.mark.slow
def test_seeds_come_from_torch(model: PreTrainedModel) -> None:
    """`torch.manual_seed` decides; rows of one prompt differ; greedy calls leave torch's generator alone."""
    asked = {"max_new_tokens": 12, "do_sample": True, "num_return_sequences": 3, "custom_generate": by_eyas()}
    made = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        made.append(model.generate(padded()["input_ids"][:1], **asked))
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])
    assert len({tuple(row) for row in made[0].tolist()}) == 3
    torch.manual_seed(5)
    state = torch.get_rng_state()
    model.generate(**padded(), max_new_tokens=3, do_sample=False, custom_generate=by_eyas())
    assert torch.equal(torch.get_rng_state(), state)


REFUSED: dict[str, dict[str, Any]] = {
    "num_beams": {"num_beams": 2},
    "penalty_alpha": {"penalty_alpha": 0.6, "top_k": 4},
    "dola_layers": {"dola_layers": "low"},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3},
    "guidance_scale": {"guidance_scale": 2.0},
    "output_attentions": {"output_attentions": True, "return_dict_in_generate": True},
    "output_hidden_states": {"output_hidden_states": True, "return_dict_in_generate": True},
    "cache_implementation": {"cache_implementation": "offloaded"},
    "past_key_values": {"past_key_values": DynamicCache},
    "inputs_embeds": {"inputs_embeds": lambda: torch.zeros(1, 3, 48), "inputs": None},
    "position_ids": {"position_ids": lambda: torch.arange(9)[None] + 4},
    "attention_mask": {"attention_mask": lambda: torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1, 1]])},
    "padding_side": {"attention_mask": lambda: torch.tensor([[1, 1, 1, 1, 1, 1, 1, 0, 0]])},
    "context": {"max_new_tokens": 2000},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept_is_refused_by_name(model: PreTrainedModel, name: str) -> None:
    """Ignored, each of them would give another text, or another result, than was asked for."""
    made = {key: value() if callable(value) else value for key, value in REFUSED[name].items()}
    asked = {"inputs": padded()["input_ids"][:1], "max_new_tokens": 3, **made}
    with pytest.raises(EyasError, match=name) as caught:
        model.generate(**asked, custom_generate=by_eyas())
    assert "\n" not in str(caught.value)


INPUTS: dict[str, Tensor] = {
    "encoder_hidden_states": torch.randn(1, 4, 48, generator=torch.Generator().manual_seed(0)),
    "encoder_attention_mask": torch.tensor([[1, 0, 1, 1]]),
    "token_type_ids": torch.full((1, 9), 9),
    "token_type_ids of type 0": torch.zeros(1, 9, dtype=torch.long),  # GPT-2 adds the embedding of token 0
}


@pytest.mark.parametrize("case", INPUTS)
def test_inputs_that_every_forward_reads_are_refused(case: str) -> None:
    """Guards inputs that went in with the prompt, as an image does, or nowhere: another text without a word."""
    model, name = zoo.tiny("gpt2", add_cross_attention=True), case.partition(" ")[0]
    asked = {"inputs": padded()["input_ids"][:1], "max_new_tokens": 3, "pad_token_id": PAD, name: INPUTS[case]}
    with pytest.raises(EyasError, match=f"^{name} is not served by eyas"):
        model.generate(**asked, custom_generate=by_eyas())
    if name != "encoder_attention_mask":
        llm = eyas.load(model, method="vanilla", tokenizer=False)
        prompt = {"input_ids": asked["inputs"], name: INPUTS[case]}
        if "type 0" in case:  # as tokenizers write it to every text
            assert llm.generate(prompt, max_new_tokens=3) is not None
            return
        with pytest.raises(EyasError, match=name):
            llm.generate(prompt, max_new_tokens=3)


def test_assistants_and_training_mode_are_refused(model: PreTrainedModel) -> None:
    """transformers drops an assistant_model without a word; dropout would change every text."""
    ids, custom = padded()["input_ids"][:1], by_eyas()
    with pytest.raises(EyasError, match="assistant_model"):
        model.generate(ids, assistant_model=zoo.tiny("llama", vocab_size=VOCAB), custom_generate=custom)
    model.generate(ids, max_new_tokens=2, custom_generate=custom)
    model.train()
    with pytest.raises(EyasError, match="training mode"):
        model.generate(ids, max_new_tokens=2, custom_generate=custom)
    with pytest.raises(EyasError, match="dtype is the model's"):
        eyas.hf(dtype="float16")
    model.eval()
    for wrong, words in ((eyas.hf, "with its parentheses"), (eyas.hf(no_such=3), "no_such")):
        with pytest.raises(EyasError, match=words):
            model.generate(torch.tensor([[3]]), custom_generate=wrong)
