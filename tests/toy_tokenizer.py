"""A byte-level tokenizer with a chat template, for tiny models of `VOCAB` tokens."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<|bos|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|pad|>"]
VOCAB = 256 + len(SPECIAL)
TEMPLATE = (
    "<|bos|>{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|end|>{% endgeneration %}{% else %}{{ m['content'] }}<|end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Special tokens are 0..5, the byte b is 6 + its place in the byte-level alphabet."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(SPECIAL + alphabet)}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    special = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[1], "pad_token": SPECIAL[5]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **special, additional_special_tokens=SPECIAL[2:5])
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer
