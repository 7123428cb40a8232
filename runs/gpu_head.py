"""Train the EAGLE-3 head of SmolLM2-135M-Instruct on a GPU, from its own answers, in nine minutes.

    python runs/gpu_head.py prompts --data DATA/train --folder out/gpu_head   # no GPU needed
    python runs/gpu_head.py answers --folder out/gpu_head --seconds 115     # 10.2M tokens on an H200
    python runs/gpu_head.py train --folder out/gpu_head --seconds 410       # 31.6M tokens read
    python runs/gpu_head.py keep --folder out/gpu_head --output runs/answers/general_gpu.npz --limit 12000

`prompts` packs general prompts, questions of chats and the answers in runs/answers as token ids. `answers` answers prompts
until the time is over, three fifths of them at T = 1. Its own loop decodes thousands of rows at once. `train` uses Muon. The
learning rate falls by the clock, and the training-time test has two steps, after half of the time four. Greedy answers to
reserved prompts are held out; curve.json gets the acceptance of a chain in them. --device cpu with small numbers tries it.

Letters: B rows, T slots of a row's cache, K key-value heads, h head size, W longest prompt.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import smollm2
import torch
from _common import run
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoTokenizer

import eyas
from eyas import named
from eyas.core.options import build_options
from eyas.drafters import find
from eyas_train.config import TrainConfig
from eyas_train.data import Batches, Example, Examples
from eyas_train.features import batch_of
from eyas_train.loop import train as run_training
from eyas_train.method_losses import hidden_by_step
from eyas_train.reporter import Progress
from eyas_train.start import fit_start

BEGAN = time.time()
TARGET, END, VOCABULARY = "smollm2-q4_1", 2, 49_152
GENERAL, CHAT, RESERVED = 0, 1, 2  # kinds of prompts
LONGEST_PROMPT, NEW_TOKENS, LONGEST = 256, 384, 768
MILESTONES = (0.5e6, 1e6, 2e6, 5e6, 10e6, 20e6, 40e6, 80e6)  # tokens read
HEAD = {"head.draft_vocab": 16_384, "head.depth": 4, "head.kv_heads": 9, "head.norm_output": True, "head.fc_norm": True}
Ids = np.ndarray[Any, Any]


def say(*words: object) -> None:
    print(f"[{time.time() - BEGAN:6.1f}]", *words, flush=True)


# --- prompts


def prompts(args: argparse.Namespace) -> None:
    """Pack the prompts in the order of runs/smollm2.py, and the answers that are here."""
    tokenizer = AutoTokenizer.from_pretrained(named.place_of(TARGET))

    def prompt_of(chat: dict[str, Any]) -> list[int]:
        turns = chat["conversations"][:1]
        ids: list[int] = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        return ids

    general, chats = args.data / "prompts.jsonl.gz", args.data / "chat.jsonl.gz"
    order = smollm2.questions_in_order(general)
    asked = [
        (RESERVED, order[-smollm2.RESERVED :][:240]),
        (CHAT, smollm2.questions_in_order(chats)[: -smollm2.RESERVED]),
        (GENERAL, order[8_000 : 8_000 + args.general]),
    ]
    found = [(kind, line, prompt_of(chat)) for kind, lines in asked for line, chat in lines]
    found = [one for one in found if len(one[2]) <= LONGEST_PROMPT]
    kinds, lines, texts = zip(*found, strict=True)
    save(args.folder / "prompts.npz", texts, kind=kinds, line=lines)
    old = []
    for source, names in ((chats, "smollm2_[abcd]"), (general, "general_[01]")):
        by_line = dict(smollm2.read(source))
        for file in sorted(Path("runs/answers").glob(f"{names}.npz")):
            for line, ids in smollm2.answers_in(file).items():
                ended = ids if len(ids) >= NEW_TOKENS - 1 else [*ids, END]
                old.append((prompt_of(by_line[line]), ended))
    old = [(prompt, answer) for prompt, answer in old if len(prompt) + len(answer) <= LONGEST]
    save(args.folder / "old.npz", [p + a for p, a in old], asked=[len(p) for p, _ in old])
    say(f"{len(found):,} prompts, {len(old):,} answers that are here")


def save(path: Path, texts: Sequence[Sequence[int] | Ids], **columns: Sequence[int]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lengths = np.array([len(text) for text in texts], np.int32)
    ids = np.concatenate([np.asarray(text, np.uint16) for text in texts])
    np.savez_compressed(path, ids=ids, length=lengths, **{name: np.array(of, np.int32) for name, of in columns.items()})


def load(path: Path) -> tuple[list[Ids], dict[str, Ids]]:
    """The texts of a file, and its columns."""
    with np.load(path, allow_pickle=False) as kept:
        columns = {name: kept[name] for name in kept.files if name not in ("ids", "length")}
        return np.split(kept["ids"], np.cumsum(kept["length"])[:-1]), columns


# --- answers


class Rows:
    """Decoding of many rows by plain torch, for a tied LLaMA."""

    def __init__(self, model: Any, rows: int) -> None:
        weight = model.model.embed_tokens.weight
        self.device, self.dtype, config = weight.device, weight.dtype, model.config
        self.heads, self.kv_heads, self.h = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.eps, self.embed, self.norm = config.rms_norm_eps, weight.detach(), model.model.norm.weight.detach()
        self.layers = [self._layer(layer) for layer in model.model.layers]
        frequency = config.rope_parameters["rope_theta"] ** -(torch.arange(0, self.h, 2, dtype=torch.float64) / self.h)
        angle = (torch.arange(LONGEST, dtype=torch.float64)[:, None] * frequency).repeat(1, 2)
        self.cos, self.sin = angle.cos().to(weight), angle.sin().to(weight)
        self.slots = LONGEST_PROMPT + NEW_TOKENS
        shape = (rows, self.slots, self.kv_heads, self.h)
        self.cache = [[torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in "kv"] for _ in self.layers]
        self.token = torch.zeros(rows, dtype=torch.long, device=self.device)
        self.position = torch.zeros_like(self.token)
        self.sampled = torch.zeros(rows, dtype=torch.float32, device=self.device)
        self.row = torch.arange(rows, device=self.device)

    def _layer(self, layer: Any) -> tuple[Tensor, ...]:
        attention, mlp = layer.self_attn, layer.mlp
        qkv = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
        both = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        matrices = [one.detach().T.contiguous() for one in (qkv, attention.o_proj.weight, both, mlp.down_proj.weight)]
        return (layer.input_layernorm.weight.detach(), layer.post_attention_layernorm.weight.detach(), *matrices)

    @torch.inference_mode()
    def begin(self, rows: Sequence[int], texts: Sequence[Ids], sampled: Sequence[bool]) -> Tensor:
        """Read prompts into rows; return their first tokens."""
        W, device = max(map(len, texts)), self.device
        ids = torch.zeros(len(texts), W, dtype=torch.long)
        for row, text in enumerate(texts):
            ids[row, : len(text)] = torch.from_numpy(text.astype(np.int64))  # padded after the text, which is causal
        length, where = torch.tensor([len(text) for text in texts], device=device), torch.tensor(rows, device=device)
        groups = self.heads // self.kv_heads

        def attend(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            for kept, new in zip(self.cache[number], (k, v), strict=True):
                kept[where, :W] = new
            wide = (x.transpose(1, 2) for x in (q, k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)))
            return F.scaled_dot_product_attention(*wide, is_causal=True).transpose(1, 2)

        x = self._through(self.embed[ids.to(device)], self.cos[:W, None], self.sin[:W, None], attend)
        self.position[where], self.sampled[where] = length, torch.tensor(sampled, dtype=torch.float32, device=device)
        self.token[where] = self._draw(x[torch.arange(len(texts), device=device), length - 1], self.sampled[where])
        return self.token[where]

    @torch.inference_mode()
    def step(self) -> Tensor:
        """Decode one token of every row."""
        position = self.position
        count = (position + 1).int()

        def attend(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.cache[number]
            keys[self.row, position], values[self.row, position] = k, v
            return self._attention(q, keys, values, count)

        x = self._through(self.embed[self.token], self.cos[position][:, None], self.sin[position][:, None], attend)
        self.token, self.position = self._draw(x, self.sampled), (position + 1).clamp(max=self.slots - 1)
        return self.token

    def _attention(self, q_BHh: Tensor, key_BTKh: Tensor, value_BTKh: Tensor, count_B: Tensor) -> Tensor:
        B, T, K, h = key_BTKh.shape
        if q_BHh.is_cuda:
            begin = torch.arange(B + 1, dtype=torch.int32, device=self.device)
            flat = (x.view(-1, K, h) for x in (key_BTKh, value_BTKh))
            flash = torch.ops.aten._flash_attention_forward
            return flash(q_BHh, *flat, begin, begin * T, 1, T, 0.0, False, False, seqused_k=count_B)[0]  # type: ignore[no-any-return]
        scores = torch.einsum("bkgh,btkh->bkgt", q_BHh.view(B, K, -1, h), key_BTKh) * h**-0.5
        scores.masked_fill_(torch.arange(T, device=self.device) >= count_B[:, None, None, None], -torch.inf)
        return torch.einsum("bkgt,btkh->bkgh", scores.softmax(-1), value_BTKh)

    def _through(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Any) -> Tensor:
        def rotated(heads: Tensor) -> Tensor:
            a, b = heads.chunk(2, -1)
            return heads * cos + torch.cat([-b, a], -1) * sin

        for number, (norm, mlp_norm, qkv, output, gate_up, down) in enumerate(self.layers):
            mixed = (F.rms_norm(x, norm.shape, norm, self.eps) @ qkv).view(*x.shape[:-1], -1, self.h)
            q, k, v = mixed.split([self.heads, self.kv_heads, self.kv_heads], -2)
            x = x + attend(number, rotated(q), rotated(k), v).reshape(*x.shape[:-1], -1) @ output
            gate, up = (F.rms_norm(x, norm.shape, mlp_norm, self.eps) @ gate_up).chunk(2, -1)
            x = x + (F.silu(gate) * up) @ down
        return F.rms_norm(x, self.norm.shape, self.norm, self.eps)

    def _draw(self, x: Tensor, sampled: Tensor) -> Tensor:
        wide: Any = {"out_dtype": torch.float32} if x.is_cuda else {}
        logits = torch.mm(x, self.embed.T, **wide).float()
        noise = torch.empty_like(logits).exponential_().log_().nan_to_num_(0, 0, 0)
        return (logits - noise * sampled[:, None]).argmax(-1)


def answer_all(
    rows: Rows, texts: Sequence[Ids], sampled: Ids, until: float, every: int = 16, chunk: int = 128
) -> list[tuple[int, Ids]]:
    """(number of the prompt, its answer) of all that end in time. Prompts that are neighbours are read together."""
    B, done, waiting = len(rows.row), list[tuple[int, Ids]](), 0
    owner, have, written = np.full(B, -1), np.zeros(B, np.int64), np.zeros((B, NEW_TOKENS), np.uint16)
    tokens, told = 0, time.time()
    while time.time() < until and (waiting < len(texts) or (owner >= 0).any()):
        free = np.nonzero(owner < 0)[0]
        while waiting < len(texts) and len(free) >= min(chunk, B, len(texts) - waiting):
            mine, free = free[:chunk], free[chunk:]
            some = list(range(waiting, min(waiting + len(mine), len(texts))))
            waiting, mine = waiting + len(some), mine[: len(some)]
            written[mine, 0] = rows.begin(mine.tolist(), [texts[i] for i in some], sampled[some].tolist()).cpu().numpy()
            owner[mine], have[mine] = some, 1
        made = torch.stack([rows.step() for _ in range(every)]).cpu().numpy()
        busy = np.nonzero(owner >= 0)[0]
        for step in made:
            room = busy[have[busy] < NEW_TOKENS]
            written[room, have[room]] = step[room]
            have[room] += 1
        is_end = (written[busy] == END) & (np.arange(NEW_TOKENS) < have[busy, None])
        for row, ends in zip(busy, is_end, strict=True):
            if ends.any() or have[row] >= NEW_TOKENS:
                answer = written[row, : int(ends.argmax()) + 1 if ends.any() else NEW_TOKENS].copy()
                done.append((int(owner[row]), answer))
                tokens, owner[row] = tokens + len(answer), -1
        if time.time() - told > 10:
            told = time.time()
            say(f"{len(done):,} answers, {tokens:,} tokens")
    say(f"{len(done):,} answers, {tokens:,} tokens")
    return done


def answers(args: argparse.Namespace) -> None:
    """Answer prompts until the time is over."""
    texts, columns = load(args.folder / "prompts.npz")
    dice = np.random.default_rng(3)
    sampled = (dice.random(len(texts)) < 0.6) & (columns["kind"] != RESERVED)
    lengths, order = np.array([len(text) for text in texts]), list[Ids]()
    for kinds in ((RESERVED,), (GENERAL, CHAT)):  # the reserved ones first; then chunks of like length, shuffled
        some = np.nonzero(np.isin(columns["kind"], kinds))[0]
        some = some[np.lexsort((dice.random(len(some)), lengths[some] // 8))]
        chunks = [some[i : i + 128] for i in range(0, len(some), 128)]
        order += [chunks[i] for i in dice.permutation(len(chunks))]
    chosen = np.concatenate(order)[: args.limit or None]
    torch.manual_seed(7)
    rows = Rows(loaded(args).target.model, args.rows)
    done = answer_all(rows, [texts[i] for i in chosen], sampled[chosen], BEGAN + args.seconds)
    at = chosen[[i for i, _ in done]]
    save(args.folder / "answers.npz", [text for _, text in done], at=at, sampled=sampled[at].astype(int))


def loaded(args: argparse.Namespace) -> Any:
    dtype = "float32" if args.device == "cpu" else "bfloat16"
    return eyas.load(target=args.target, device=args.device, dtype=dtype, kernels="off", method="vanilla")


def keep(args: argparse.Namespace) -> None:
    """Write the answers as runs/answers has them: by the line of their prompt, without the end of the turn."""
    kinds = load(args.folder / "prompts.npz")[1]
    texts, columns = load(args.folder / "answers.npz")
    chosen = [i for i, at in enumerate(columns["at"]) if kinds["kind"][at] == (CHAT if args.chats else GENERAL)]
    chosen = np.random.default_rng(0).permutation(chosen)[: args.limit or None]
    lines, sampled = kinds["line"][columns["at"][chosen]], columns["sampled"][chosen]
    save(args.output, [texts[i][:-1] if texts[i][-1] == END else texts[i] for i in chosen], line=lines, sampled=sampled)
    say(f"{len(chosen):,} answers, {args.output.stat().st_size / 1e6:.1f} MB")


# --- training


def examples_in(folder: Path) -> tuple[Examples, Examples]:
    """Examples for training, and the held-out ones."""
    train, heldout = Examples(), Examples()
    texts, columns = load(folder / "old.npz")
    pairs = [(train, text[:asked], text[asked:]) for text, asked in zip(texts, columns["asked"], strict=True)]
    if (folder / "answers.npz").exists():
        (questions, about), (texts, columns) = load(folder / "prompts.npz"), load(folder / "answers.npz")
        for at, text in zip(columns["at"], texts, strict=True):
            if len(text) >= 3:
                pairs.append((heldout if about["kind"][at] == RESERVED else train, questions[at], text))
    for into, prompt, answer in pairs:
        into.append(Example([*prompt.tolist(), *answer.tolist()], [False] * len(prompt) + [True] * len(answer)))
    return train, heldout


@torch.no_grad()
def forced_figures(drafter: Any, heldout: Examples, steps: int = 5, depth: int = 4) -> dict[str, Any]:
    """Return n-alpha and tau of a chain, as decoding these greedy answers would give them.

    The net reads the true tokens before each slot. A draft after right ones has read the same tokens when it decodes."""
    batches, device = Batches(heldout, 32_768), drafter.target.device
    reached, right = np.zeros(steps), np.zeros(steps)
    tokens = passes = 0
    training, width = drafter.net.training, len(drafter.feature_layers) * drafter.target.hidden_size
    drafter.net.eval()
    for indices in batches.plan(None):
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            batch = batch_of(batches, indices, drafter)
            N, end_N = len(batch.tokens_N), batch.documents.end_N(device)
            slot_N = torch.arange(N, device=device)
            following, goal = (batch.counted_N[(slot_N + n).clamp(max=N - 1)] for n in (1, 2))
            is_slot_N = following & goal & (slot_N + 2 < end_N)  # the answer's first token comes with the prompt
            rows_M = is_slot_N.nonzero()[:, 0]
            features = batch.features_NF[:, :width].to(drafter.dtype)
            hidden = hidden_by_step(drafter, batch, features, rows_M, steps)
            lead_M, all_right_M = torch.zeros_like(rows_M), torch.ones_like(rows_M, dtype=torch.bool)
            for step, hidden_MD in enumerate(hidden):
                parts = [drafter.net.head(part).argmax(-1) for part in drafter.net.head_input(hidden_MD).split(8192)]
                goal_M = rows_M + 2 + step
                is_right_M = drafter.draft_ids_v[torch.cat(parts)] == batch.tokens_N[goal_M.clamp(max=N - 1)]
                all_right_M = all_right_M & is_right_M & (goal_M < end_N[rows_M])
                lead_M = lead_M + all_right_M
        lead, end = lead_M.cpu().numpy(), end_N[rows_M].cpu().numpy()
        for step in range(steps):
            reached[step] += (lead >= step).sum()
            right[step] += (lead > step).sum()
        for document in np.unique(end):
            runs, at = lead[end == document], 0
            while at < len(runs):
                tokens, passes, at = tokens + min(depth, runs[at]) + 1, passes + 1, at + min(depth, runs[at]) + 1
    drafter.net.train(training)
    shares = [round(float(share), 4) for share in right / np.maximum(1, reached)]
    tau = round(tokens / max(1, passes), 3)
    return {"slots": int(reached[0]), "n-alpha": shares, f"tau of a chain of {depth}": tau}


def train(args: argparse.Namespace) -> None:
    """Train a new head until the time is over."""
    torch.set_float32_matmul_precision("high")
    target, (examples, heldout) = loaded(args).target, examples_in(args.folder)
    kind, counts_V = find("eagle3"), torch.zeros(VOCABULARY, dtype=torch.long)
    for example in examples:
        counts_V += torch.bincount(torch.tensor(example.ids)[torch.tensor(example.counted)], minlength=VOCABULARY)
    drafter: Any = kind.init_for_training(target, build_options(kind.Options, {**HEAD, "ttt.steps": 2}), 1, counts_V)
    say(f"{len(examples):,} examples, {len(heldout)} held out;", fit_start(drafter, examples, 32_768, 1))
    begun, whole, curve, now = time.time(), BEGAN + args.seconds - time.time(), list[dict[str, Any]](), {"tokens": 0}
    log = args.folder / "eagle3" / "log.jsonl"

    def note() -> None:
        curve.append({**now, "seconds": round(time.time() - begun, 1), **forced_figures(drafter, heldout)})
        say(json.dumps(curve[-1]))

    def stop() -> bool:
        if drafter.options.ttt.steps == 2 and time.time() - begun > whole / 2:
            drafter.options = replace(drafter.options, ttt=replace(drafter.options.ttt, steps=4))
        if len(curve) <= len(MILESTONES) and now["tokens"] >= ([0, *MILESTONES])[len(curve)]:
            note()
        return time.time() > begun + whole

    config = TrainConfig(
        lr=1.5e-3, min_lr_share=0.02, optimizer="muon", warmup_steps=40, minutes=whole / 60, batch_tokens=args.batch_tokens,
        max_length=LONGEST, seed=1, eval_every=0, save_every=0, precision="auto" if args.device == "cpu" else "bf16",
        heldout_tokens=4_000,
    )  # fmt: skip

    def progress(at: Progress) -> None:
        if at.step and at.step % config.log_every == 0 and not at.note:
            now["tokens"] = json.loads(log.read_text().splitlines()[-1])["tokens"]
        if at.note or at.step % 50 == 1:
            say(f"step {at.step}, {at.tokens_per_second:,.0f} tokens/s", at.note)

    watched: Any = {"stop": stop, "progress": progress}
    result = run_training(drafter, examples, heldout[:8], config, log.parent, resume=False, **watched)
    now["tokens"] = result.tokens
    note()
    record = {"command": " ".join(sys.argv), "curve": curve}
    (args.folder / "curve.json").write_text(json.dumps(record, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("prompts", "answers", "train", "keep"))
    parser.add_argument("--folder", type=Path, required=True, help="what the stages leave for one another")
    parser.add_argument("--data", type=Path, help="of prompts: the folder with prompts.jsonl.gz and chat.jsonl.gz")
    parser.add_argument("--output", type=Path, help="of keep: the file of answers")
    parser.add_argument("--chats", action="store_true", help="of keep: answers to questions of chats")
    parser.add_argument("--target", default=TARGET, help="a folder, where the named model cannot be fetched")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=400, help="of the whole process")
    parser.add_argument("--general", type=int, default=90_000, help="general prompts")
    parser.add_argument("--rows", type=int, default=3_072, help="rows that are decoded together")
    parser.add_argument("--limit", type=int, default=0, help="prompts to answer, or answers to keep; 0: all")
    parser.add_argument("--batch-tokens", type=int, default=16_384)
    args = parser.parse_args()
    {"prompts": prompts, "answers": answers, "train": train, "keep": keep}[args.stage](args)


if __name__ == "__main__":
    run(main)
