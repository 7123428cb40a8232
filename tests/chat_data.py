"""Chat templates, a tokenizer of each kind, and lines of chat data as files: for tests of what training reads."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from eyas_train.data import Example, read

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED_CONTENT = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
MARKED_NEWLINE = MARKED.replace("<|im_end|>{% endgeneration %}", "<|im_end|>{{ '\\n' }}{% endgeneration %}")
INSTRUCT = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
# Drops the reasoning of every reply but the last, as thinking models do.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' and not loop.last %}"
    "{{ m['content'].split('</think>')[-1] }}{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETFUL_MARKED = FORGETFUL.replace(
    "{% else %}{{ m['content'] }}{% endif %}",
    "{% elif m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}",
)
# Opens a reply with <think>, which a given reply does not have.
THINKING = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
# Writes a system's turn where the conversation has none, as SmolLM2's and Qwen2.5's.
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are kind.<|im_end|>\n{% endif %}" + CHATML
)
STRICT = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turns here') }}{% endif %}" + CHATML


def byte_level() -> Tokenizer:
    """Every byte a token, and offsets without the space before a word, as GPT-2's."""
    vocab = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def merging() -> Tokenizer:
    """Learnt merges, and trimmed offsets: ' hello' is said to stand on 'hello' alone."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True)
    tokenizer.decoder = decoders.ByteLevel()
    sentences = ["hello there, how are you today", "fine thanks and you", "user assistant system"] * 20
    trainer = trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(sentences, trainer)
    return tokenizer


def metaspace() -> Tokenizer:
    """Like a SentencePiece model: a space before the text, spaces belong to the word after them, text is normalised."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    sentences = [
        "hello there, how are you today?",
        "fine thanks and you! [INST] [/INST]",
        "user assistant\n system é ü",
    ] * 20
    trainer = trainers.UnigramTrainer(vocab_size=120, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(sentences, trainer)
    return tokenizer


def tokenizer_with(template: str | None, make: Any = byte_level) -> PreTrainedTokenizerFast:
    backend = make()
    backend.add_special_tokens(
        [AddedToken(name, special=True) for name in ("<s>", "</s>", "<|im_start|>", "<|im_end|>")]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


def turns(*contents: str, first: str = "user") -> list[dict[str, str]]:
    """user, assistant, user, ... with these contents."""
    pair = ("user", "assistant") if first == "user" else ("assistant", "user")
    return [{"role": pair[i % 2], "content": content} for i, content in enumerate(contents)]


TWO = turns("hello there", "fine thanks", "and you", "how are you")


def write(folder: Path, *lines: Any, name: str = "chat.jsonl") -> Path:
    file = folder / name
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    file.write_text("".join(text + "\n" for text in texts), encoding="utf-8")
    return file


def one(folder: Path, tokenizer: Any, messages: Any, **options: Any) -> Example:
    data = read(write(folder, {"messages": messages}), tokenizer, **options)
    assert len(data.train) == 1, data.report.problems
    example: Example = data.train[0]
    return example


def counted_texts(tokenizer: Any, example: Example) -> list[str]:
    """Returns the text of each run of counted tokens."""
    runs: list[list[int]] = []
    for i, token in enumerate(example.ids):
        if example.counted[i]:
            if i == 0 or not example.counted[i - 1]:
                runs.append([])
            runs[-1].append(token)
    return [tokenizer.decode(run, clean_up_tokenization_spaces=False) for run in runs]
