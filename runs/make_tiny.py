"""How the embedded model was made, stage by stage; every stage can be run again.

    python runs/make_tiny.py tokenizer --chat CHAT.jsonl.gz --text STORIES.txt.gz --output out/tiny/base
    python runs/make_tiny.py tokens    --model out/tiny/base --chat CHAT.jsonl.gz --text NOVELS.txt.gz ... --output out/tiny/tokens
    python runs/make_tiny.py pretrain  --tokens out/tiny/tokens --model DIR_OR_NONE --output out/tiny/run --minutes 75 --long-minutes 15
    python runs/make_tiny.py quantise  --model out/tiny/run/model --output tiny/eyas_tiny/weights
    python runs/make_tiny.py head      --model out/tiny/head --output tiny/eyas_tiny/weights/eagle1      (or eagle3, mtp)
    python runs/make_tiny.py widen     --model out/tiny/head3a --output out/tiny/head3w
    python runs/make_tiny.py questions --chat CHAT.jsonl.gz --without HELDIN.jsonl.gz --limit 3000 --output out/tiny/questions.jsonl
    python runs/make_tiny.py extend    --model out/tiny/head3d --output out/tiny/head3e
    python runs/make_tiny.py narrow    --model out/tiny/head3f --chat out/tiny/own_t1.jsonl --size 6144 --output out/tiny/head3g
    python runs/make_tiny.py report    --chat HELDIN.jsonl.gz --book BOOK.txt.gz --output docs/results/tiny.json

Chat files hold one JSON object a line with `conversations: [{role, content}]`; text files hold
documents parted by <|endoftext|>. `pretrain` checkpoints every few minutes and resumes by itself
when it is started again with the same --output. The draft head is made afterwards by `eyas train`
(see runs/make_tiny.sh).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.checkpoint
from _common import open_text
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eyas import checkpoints, tiny
from eyas.core.target import Target
from eyas.drafters.eagle3 import DRAFT_IDS, choose_draft_vocabulary
from eyas.files import CHECKSUMS, sha256_of_folder, to_int8, write_atomically, write_text
from eyas.targets.fingerprints import fingerprint

SHAPE = dict(  # the architecture of the embedded model
    hidden_size=384, num_hidden_layers=16, num_attention_heads=6, num_key_value_heads=2, head_dim=64, intermediate_size=1024,
    vocab_size=8192, max_position_embeddings=4096, tie_word_embeddings=True, initializer_range=0.03, rms_norm_eps=1e-6,
    bos_token_id=0, eos_token_id=1, pad_token_id=5,
)  # fmt: skip
SPECIAL = ["<|bos|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|pad|>"]
COPIED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
CHAT_TEMPLATE = (
    "<|bos|>{% for m in messages %}{% if m['role'] == 'assistant' %}<|assistant|>\n"
    "{% generation %}{{ m['content'] | trim }}<|end|>{% endgeneration %}\n"
    "{% else %}<|{{ m['role'] }}|>\n{{ m['content'] | trim }}<|end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def read_lines(path: Path) -> Iterator[str]:
    with open_text(path) as lines:
        yield from lines


def chats(path: Path) -> Iterator[list[dict[str, str]]]:
    for line in read_lines(path):
        yield json.loads(line)["conversations"]


def documents(path: Path) -> Iterator[str]:
    for text in "".join(read_lines(path)).split("<|endoftext|>"):
        if text.strip():
            yield text.strip()


def tokenizer_stage(args: argparse.Namespace) -> None:
    """A byte-level BPE of 8,192 tokens over all the training text."""

    def texts() -> Iterator[str]:
        for path in args.chat:
            for turns in chats(path):
                yield "\n".join(t["content"] for t in turns)
        for path in args.text:
            yield from documents(path)

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    limits = {"vocab_size": SHAPE["vocab_size"], "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    bpe.train_from_iterator(texts(), trainers.BpeTrainer(special_tokens=SPECIAL, **limits))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=SPECIAL[0], eos_token=SPECIAL[1], pad_token=SPECIAL[5],
        additional_special_tokens=SPECIAL[2:5], model_max_length=SHAPE["max_position_embeddings"],
    )  # fmt: skip
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(args.output)


def tokens_stage(args: argparse.Namespace) -> None:
    """Tokenise once: chat.bin (conversations, shuffled), text.bin (documents), heldout.bin (every
    100th conversation)."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    args.output.mkdir(parents=True, exist_ok=True)
    conversations = [c for path in args.chat for c in chats(path)]
    order = np.random.default_rng(args.seed).permutation(len(conversations))
    streams: dict[str, list[np.ndarray]] = {"chat": [], "heldout": [], "text": []}
    for rank, index in enumerate(order):
        text = tokenizer.apply_chat_template(conversations[index], tokenize=False)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        streams["heldout" if rank % 100 == 0 else "chat"].append(np.array(ids, np.uint16))
    for path in args.text:
        for text in documents(path):
            ids = tokenizer("<|bos|>" + text + "<|end|>\n", add_special_tokens=False)["input_ids"]
            streams["text"].append(np.array(ids, np.uint16))
    for name, parts in streams.items():
        stream = np.concatenate(parts)
        stream.tofile(args.output / f"{name}.bin")
        print(f"{name}: {len(stream):,} tokens in {len(parts):,} documents")


class Blocks:
    """Endless batches of consecutive blocks; every epoch cuts at another offset and in another order."""

    def __init__(self, stream: np.ndarray, length: int, seed: int) -> None:
        self.stream, self.length, self.rng, self.queue = stream, length, np.random.default_rng(seed), []

    def take(self) -> np.ndarray:
        if not self.queue:
            offset = int(self.rng.integers(self.length))
            starts = np.arange(offset, len(self.stream) - self.length, self.length)
            self.queue = self.rng.permutation(starts).tolist()
        start = self.queue.pop()
        return self.stream[start : start + self.length].astype(np.int64)


def loss_of(model: torch.nn.Module, ids_BT: torch.Tensor, chunk: int = 2048) -> torch.Tensor:
    """Mean next-token loss in nats; logits are made and forgotten chunk by chunk."""
    hidden = model.model(input_ids=ids_BT[:, :-1], use_cache=False).last_hidden_state.flatten(0, 1)
    goal = ids_BT[:, 1:].flatten()

    def part(h: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model.lm_head(h).float(), g, reduction="sum")

    parts = zip(hidden.split(chunk), goal.split(chunk), strict=True)
    return sum(torch.utils.checkpoint.checkpoint(part, h, g, use_reentrant=False) for h, g in parts) / goal.numel()


def whole_loss(model: torch.nn.Module, ids_BT: torch.Tensor) -> torch.Tensor:
    """The same in one piece, as torch.compile likes it."""
    hidden = model.model(input_ids=ids_BT[:, :-1], use_cache=False).last_hidden_state.flatten(0, 1)
    return torch.nn.functional.cross_entropy(model.lm_head(hidden).float(), ids_BT[:, 1:].flatten())


@torch.no_grad()
def heldout_loss(model: torch.nn.Module, stream: np.ndarray, length: int, blocks: int) -> float:
    model.eval()
    ids = torch.from_numpy(stream[: blocks * length].astype(np.int64)).view(blocks, length)
    with torch.autocast("cpu", torch.bfloat16):
        value = float(np.mean([loss_of(model, row[None]).item() for row in ids]))
    model.train()
    return value


def pretrain_stage(args: argparse.Namespace) -> None:
    """Train (or go on training) the target: --minutes at 1,024 tokens, then --long-minutes at 4,096.

    The learning rate warms up to --lr, falls linearly in time to a fifth, and to zero in the long phase.
    Long blocks come from novels and chats in equal parts, so that chatting is not forgotten.
    """
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    streams = {n: np.fromfile(args.tokens / f"{n}.bin", np.uint16) for n in ("chat", "text", "heldout")}
    config = LlamaConfig(**SHAPE, rope_parameters={"rope_type": "default", "rope_theta": 50_000.0})
    model = (
        AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        if args.init == "model"
        else LlamaForCausalLM(config)
    )
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) == wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)
    args.output.mkdir(parents=True, exist_ok=True)
    state_path, log = args.output / "state.pt", (args.output / "log.jsonl").open("a")
    step = tokens = 0
    spent = 0.0  # seconds of training; a pause counts as nothing
    if state_path.exists():
        state = torch.load(state_path, weights_only=True)
        model.load_state_dict(state["model"])
        optimiser.load_state_dict(state["optimiser"])
        step, tokens, spent = state["step"], state["tokens"], state["spent"]
    total, short = 60 * (args.minutes + args.long_minutes), 60 * args.minutes
    sources = {
        (length, name): Blocks(streams[name], length + 1, args.seed + step)
        for length in (1024, 4096)
        for name in ("chat", "text")
    }
    picks = np.random.default_rng(args.seed + step)

    def report(**values: object) -> None:
        print(json.dumps(values), file=log, flush=True)
        print(values, flush=True)

    def checkpoint() -> None:
        state = dict(model=model.state_dict(), optimiser=optimiser.state_dict(), step=step, tokens=tokens, spent=spent)
        with write_atomically(state_path) as stream:
            torch.save(state, stream)

    model.train()
    train_loss = torch.compile(whole_loss) if args.compile else loss_of
    last_save = time.monotonic()
    while spent < total:
        began = time.monotonic()
        length = 1024 if spent < short else 4096
        falling = 1 - 0.8 * spent / short if spent < short else 0.2 * (total - spent) / (total - short)
        lr = args.lr * falling * min(1.0, (step + 1) / args.warmup)
        for group in optimiser.param_groups:
            group["lr"] = lr
        share = 0.25 if length == 1024 else 0.5
        names = ["text" if picks.random() < share else "chat" for _ in range(args.batch_tokens // length)]
        rows = [sources[length, name].take() for name in names]
        with torch.autocast("cpu", torch.bfloat16):
            loss = train_loss(model, torch.from_numpy(np.stack(rows)))
        loss.backward()
        if not math.isfinite(loss.item()):
            raise SystemExit(f"loss is {loss.item()} at step {step}; the last good state is in {state_path}")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        step, tokens = step + 1, tokens + args.batch_tokens
        seconds = time.monotonic() - began
        spent += min(seconds, 60.0)
        if step % 10 == 0:
            report(step=step, minutes=round(spent / 60, 1), loss=round(loss.item(), 3), lr=round(lr, 6), tokens=tokens,
                   tokens_per_s=round(args.batch_tokens / seconds), length=length)  # fmt: skip
        if step % 100 == 0:
            report(step=step, heldout_1024=round(heldout_loss(model, streams["heldout"], 1025, 16), 4))
        if time.monotonic() - last_save > 300:
            checkpoint()
            last_save = time.monotonic()
    checkpoint()
    report(step=step, tokens=tokens, heldout_1024=round(heldout_loss(model, streams["heldout"], 1025, 16), 4))
    model.to(torch.bfloat16).save_pretrained(args.output / "model")
    AutoTokenizer.from_pretrained(args.model).save_pretrained(args.output / "model")


def quantise_stage(args: argparse.Namespace) -> None:
    """Pack a model for the repository: int8 matrices, its tokenizer, configuration and chat template."""
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / CHECKSUMS).unlink(missing_ok=True)  # those of the model before
    save_file(to_int8(load_file(args.model / "model.safetensors")), args.output / tiny.PACKED)
    for name in COPIED:
        (args.output / name).write_bytes((args.model / name).read_bytes())
    exact, packed = load_file(args.model / "model.safetensors"), tiny.model(args.output).state_dict()
    error = max(float((exact[n].float() - packed[n]).abs().max() / exact[n].float().abs().max()) for n in exact)
    size = sum(f.stat().st_size for f in args.output.iterdir() if f.is_file())
    print(f"{size / 1e6:.1f} MB; largest rounding error {error:.4f} of a matrix's largest entry")


def head_stage(args: argparse.Namespace) -> None:
    """Copy a trained head into the package, its matrices in int8; and the checksums of everything
    there, for `eyas doctor`."""
    args.output.mkdir(parents=True, exist_ok=True)
    tensors = load_file(args.model / "model.safetensors")
    tensors.pop("embed_tokens.weight", None)  # the target's
    save_file(to_int8(tensors), args.output / "model.safetensors")
    record = (args.model / "training.json").read_text()
    (args.output / "training.json").write_text(re.sub(r"(?<= )/[^ ]*/", "", record))  # no folders of the machine
    folder = args.output.parent
    files = sorted(f for f in folder.rglob("*") if f.is_file() and f.name != CHECKSUMS)
    for f in files:
        f.chmod(0o644)
    config = json.loads((args.model / "config.json").read_text())
    config["torch_dtype"] = "float32"
    config["eyas"]["target_fingerprint"] = fingerprint(Target(tiny.model(folder)))
    (args.output / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / CHECKSUMS).write_text(json.dumps(sha256_of_folder(folder), indent=1) + "\n")
    print(f"{sum(f.stat().st_size for f in files) / 1e6:.1f} MB in {folder}")


def widen_stage(args: argparse.Namespace) -> None:
    """Give every head of a draft layer keys and values of its own, by repeating the shared ones:
    what the head says stays the same."""
    weights = checkpoints.load(args.model)
    heads, shared, width = (weights.config[key] for key in ("num_heads", "num_kv_heads", "head_dim"))
    for name in ("layer.attention.k.weight", "layer.attention.v.weight"):
        rows = weights.tensors[name].unflatten(0, (shared, width)).repeat_interleave(heads // shared, 0)
        weights.tensors[name] = rows.flatten(0, 1).contiguous()
    weights.config["num_kv_heads"] = heads
    checkpoints.save(weights, args.output)


def extend_stage(args: argparse.Namespace) -> None:
    """Let an EAGLE-3 head draft every token: the new rows of its lm_head are a linear function of
    the target's, fitted to the old rows."""
    weights = checkpoints.load(args.model)
    ids_v, rows_vD = weights.tensors.pop(DRAFT_IDS), weights.tensors["head.weight"].float()
    target_VD = tiny.model().get_output_embeddings().weight.detach().float()
    inputs_VE = torch.cat([target_VD, torch.ones(len(target_VD), 1)], dim=1)
    head_VD = inputs_VE @ torch.linalg.lstsq(inputs_VE[ids_v], rows_vD).solution
    error = (head_VD[ids_v] - rows_vD).norm() / rows_vD.norm()
    head_VD[ids_v] = rows_vD
    weights.tensors.update({name: value.float() for name, value in weights.tensors.items()} | {"head.weight": head_VD})
    weights.config["draft_vocab_size"] = len(head_VD)
    checkpoints.save(weights, args.output)
    print(f"{len(ids_v):,} of {len(head_VD):,} rows as before; the fit misses them by {error:.0%} of their norm")


def questions_stage(args: argparse.Namespace) -> None:
    """Lines of chats in a random order, those of --without left out: what the target answers
    itself, for a head to be trained on."""
    held = {json.dumps(turns) for path in args.without for turns in chats(path)}
    every = [line for path in args.chat for line in read_lines(path)]
    lines = [line for line in every if json.dumps(json.loads(line)["conversations"]) not in held]
    random.Random(args.seed).shuffle(lines)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text("".join(lines[args.skip : args.skip + args.limit]))


def narrow_stage(args: argparse.Namespace) -> None:
    """Keep the --size most frequent tokens of the assistant's replies in --chat of those that an
    EAGLE-3 head drafts, in its lm_head."""
    weights, tokenizer = checkpoints.load(args.model), tiny.tokenizer()
    if DRAFT_IDS in weights.tensors:
        raise SystemExit(f"{args.model} drafts a part of the vocabulary already: give a head that drafts every token")
    counts_V = torch.zeros(weights.config["vocab_size"], dtype=torch.long)
    for path in args.chat:
        for line in read_lines(path):
            turns = json.loads(line)["messages"]
            replies = [turn["content"] + "<|end|>" for turn in turns if turn["role"] == "assistant"]
            for ids in tokenizer(replies, add_special_tokens=False)["input_ids"]:
                counts_V += torch.tensor(ids).bincount(minlength=len(counts_V))
    ids_v = choose_draft_vocabulary(counts_V, args.size)
    if ids_v is not None:
        weights.tensors.update({DRAFT_IDS: ids_v, "head.weight": weights.tensors["head.weight"][ids_v].contiguous()})
        weights.config["draft_vocab_size"] = len(ids_v)
        print(f"{len(ids_v):,} tokens, {counts_V[ids_v].sum() / counts_V.sum():.2%} of the replies'")
    checkpoints.save(weights, args.output)
    (args.output / "training.json").write_bytes((args.model / "training.json").read_bytes())


@torch.no_grad()
def report_stage(args: argparse.Namespace) -> None:
    """Held-out perplexity by position, distinct-3 and samples of the embedded model."""
    model, tokenizer = tiny.model(), tiny.tokenizer()
    conversations = [turns for path in args.chat for turns in chats(path)]
    texts = [tokenizer.apply_chat_template(turns, tokenize=False) for turns in conversations]
    ids = [row[:4096] for row in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    nats = [float(loss_of(model, torch.tensor([row])) * (len(row) - 1)) for row in ids]
    chat_loss = sum(nats) / sum(len(row) - 1 for row in ids)
    grams, samples = [], []
    for turns in conversations[:60]:
        last = max(i for i, turn in enumerate(turns) if turn["role"] == "user")
        options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        prompt = tokenizer.apply_chat_template(turns[: last + 1], **options)
        out = model.generate(**prompt, max_new_tokens=64, do_sample=False)[0, prompt["input_ids"].shape[1] :].tolist()
        grams += [tuple(out[i : i + 3]) for i in range(len(out) - 2)]
        samples.append({"user": turns[last]["content"], "answer": tokenizer.decode(out, skip_special_tokens=True)})
    result = {
        "chats": len(conversations),
        "heldout_loss_nats": round(chat_loss, 4),
        "heldout_perplexity": round(math.exp(chat_loss), 2),
        "book_loss_by_position": loss_by_position(args.book) if args.book else {},
        "distinct_3": round(len(set(grams)) / len(grams), 3),
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    write_text(args.output, json.dumps({**result, "samples": samples}, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def loss_by_position(book: Path) -> dict[str, float]:
    """The embedded model's loss on a book, by spans of positions."""
    model, text = tiny.model(), "<|bos|>" + "".join(read_lines(book))
    ids = tiny.tokenizer()(text, add_special_tokens=False)["input_ids"]
    blocks = torch.tensor(ids[: 8 * 4097]).view(8, 4097)
    loss = partial(torch.nn.functional.cross_entropy, reduction="none")
    losses = torch.stack([loss(model(row[None, :-1]).logits[0], row[1:]) for row in blocks])
    cuts = [0, 256, 1024, 2048, 3072, 4096]
    return {f"{a}-{b}": round(float(losses[:, a:b].mean()), 3) for a, b in pairwise(cuts)}


FILES: dict[str, Any] = {"type": Path, "nargs": "+", "default": []}
OPTIONS: dict[str, dict[str, Any]] = {
    "--model": {"type": Path},
    "--output": {"type": Path, "required": True},
    "--chat": FILES,
    "--text": FILES,
    "--without": FILES,
    "--book": {"type": Path},
    "--size": {"type": int, "required": True},
    "--tokens": {"type": Path, "required": True},
    "--init": {"choices": ["random", "model"], "default": "random"},
    "--compile": {"action": "store_true"},
}
NUMBERS = {
    "--seed": 0, "--skip": 0, "--limit": 3000, "--minutes": 75.0, "--long-minutes": 15.0, "--lr": 2e-3, "--warmup": 60,
    "--batch-tokens": 8192, "--threads": os.cpu_count() or 1,
}  # fmt: skip
STAGES: dict[str, tuple[Callable[[argparse.Namespace], None], str]] = {
    "tokenizer": (tokenizer_stage, "--output --chat --text"),
    "tokens": (tokens_stage, "--model --output --chat --text"),
    "quantise": (quantise_stage, "--model --output"),
    "head": (head_stage, "--model --output"),
    "widen": (widen_stage, "--model --output"),
    "extend": (extend_stage, "--model --output"),
    "questions": (questions_stage, "--output --chat --without --skip --limit"),
    "narrow": (narrow_stage, "--model --output --chat --size"),
    "report": (report_stage, "--output --chat --book"),
    "pretrain": (
        pretrain_stage,
        "--model --output --tokens --init --minutes --long-minutes --lr --warmup --batch-tokens --threads --compile",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    stages = parser.add_subparsers(required=True)
    for name, (run, flags) in STAGES.items():
        stage = stages.add_parser(name)
        stage.set_defaults(run=run)
        for flag in ("--seed", *flags.split()):
            default = NUMBERS.get(flag)
            stage.add_argument(flag, **OPTIONS.get(flag, {"type": type(default), "default": default}))
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
