"""What the heads of SmolLM2-135M-Instruct learn from: its own answers to questions of chats.

    python runs/smollm2.py questions --chats CHAT.jsonl.gz --skip 0 --limit 3500 --output out/smollm2/questions_a.jsonl
    python runs/smollm2.py pack --chats CHAT.jsonl.gz --answers out/smollm2/own_a.jsonl --output runs/answers/smollm2_a.npz
    python runs/smollm2.py chats --chats CHAT.jsonl.gz --answers runs/answers/smollm2_a.npz --output out/smollm2/chats_a.jsonl
    python runs/smollm2.py ship --answers out/smollm2/eagle3 --output tiny/eyas_tiny/weights/smollm2_eagle3

The answers between the first two commands are made by `eyas regenerate` (runs/smollm2.sh has all
commands in order). They take hours, so `pack` keeps them as token ids beside the line of their
question, 2 MB a million tokens, and `chats` makes the chats again wherever the questions are. `ship` puts
a trained head into the package eyas-tiny, its matrices in int8.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from _common import open_text, run
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from eyas import named
from eyas.errors import InputError
from eyas.files import CHECKSUMS, from_int8, sha256_of_folder, to_int8, write_atomically, write_text

SOURCES = ("dolly_qa", "dolly_3k", "rasbt_instruction_1100", "gsm8k", "gpteacher_codegen", "gpteacher_roleplay")
MAX_CHARACTERS = 2500  # of a question
SEED = 34
TEMPLATES = "own_templates"  # prompts made from templates: broad in topic, narrow in wording
TEMPLATES_KEPT = 0.4  # the share of them that is asked
RESERVED = 2_000  # prompts at the end of the order, for evaluation: no answer to them is learnt from


def questions(args: argparse.Namespace) -> None:
    """Write questions of one turn, in an order that stays the same: --limit of them, the first
    --skip left out, without those that are answered in --answers."""
    lines = questions_in_order(args.chats)
    lines = lines[-RESERVED:] if args.reserved else lines[:-RESERVED]
    chosen = lines[args.skip :][: args.limit or None]
    answered = answers_in(args.answers)
    records = [
        {"source": f"{chat['source']}:{number}", "messages": chat["conversations"][:1]}
        for number, chat in chosen
        if number not in answered
    ]
    _write_lines(args.output, records)
    print(f"{len(records):,} questions")


def questions_in_order(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return (line, chat) of all questions, in the order that stays the same; the last ones are reserved."""
    lines = [(number, chat) for number, chat in read(path) if _is_question(chat)]
    chance = random.Random(SEED)
    chance.shuffle(lines)
    return [(number, chat) for number, chat in lines if chat["source"] != TEMPLATES or chance.random() < TEMPLATES_KEPT]


def pack(args: argparse.Namespace) -> None:
    """Add answers to --output as token ids, each with the line of its question."""
    tokenizer = _tokenizer()
    place = {chat["conversations"][0]["content"]: number for number, chat in read(args.chats) if _is_question(chat)}
    answers = answers_in(args.output)
    for _, record in read(args.answers):
        question, answer = (turn["content"] for turn in record["messages"][-2:])
        ids = tokenizer.encode(answer, add_special_tokens=False)
        if question in place and tokenizer.decode(ids) == answer:
            answers[place[question]] = ids
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(args.output) as stream:
        np.savez_compressed(
            stream,
            line=np.array(list(answers), np.int32),
            length=np.array([len(ids) for ids in answers.values()], np.int32),
            ids=np.array([token for ids in answers.values() for token in ids], np.uint16),
        )
    print(f"{len(answers):,} answers, {sum(map(len, answers.values())):,} tokens")


def chats(args: argparse.Namespace) -> None:
    """Write the chats of packed answers."""
    tokenizer = _tokenizer()
    by_line = dict(read(args.chats))
    records = []
    for number, ids in answers_in(args.answers).items():
        if number not in by_line:
            raise InputError(f"{args.chats} has no line {number}: give the file that the answers were made from")
        question = by_line[number]["conversations"][0]
        records.append({"messages": [question, {"role": "assistant", "content": tokenizer.decode(ids)}]})
    _write_lines(args.output, records)
    print(f"{len(records):,} chats")


def ship(args: argparse.Namespace) -> None:
    """Copy a trained head with its matrices in int8, and write the package's checksums again."""
    tensors = from_int8(load_file(args.answers / "model.safetensors"))
    args.output.mkdir(parents=True, exist_ok=True)
    save_file(to_int8(tensors), args.output / "model.safetensors")
    config = json.loads((args.answers / "config.json").read_text()) | {"torch_dtype": "float32"}
    write_text(args.output / "config.json", json.dumps(config, indent=2) + "\n")
    record = (args.answers / "training.json").read_text()
    write_text(args.output / "training.json", re.sub(r"(?<= )/[^ ]*/", "", record))  # no folders of the machine
    folder = args.output.parent
    (folder / CHECKSUMS).unlink(missing_ok=True)
    write_text(folder / CHECKSUMS, json.dumps(sha256_of_folder(folder), indent=1) + "\n")
    print(f"{sum(file.stat().st_size for file in args.output.iterdir()) / 1e6:.1f} MB in {args.output}")


def answers_in(path: Path | None) -> dict[int, list[int]]:
    """Return packed answers by the line of their question; none where there is no file yet."""
    if path is None or not path.exists():
        return {}
    kept = np.load(path, allow_pickle=False)
    answers = np.split(kept["ids"], np.cumsum(kept["length"])[:-1])
    return {number: ids.tolist() for number, ids in zip(kept["line"].tolist(), answers, strict=True)}


def _tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(named.place_of("smollm2-q4_1"))


def read(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with open_text(path) as lines:
        for number, line in enumerate(lines):
            yield number, json.loads(line)


def _is_question(chat: dict[str, Any]) -> bool:
    turns = chat["conversations"]
    is_asked = len(turns) == 1 or chat["source"] in SOURCES
    return is_asked and turns[0]["role"] == "user" and len(turns[0]["content"]) < MAX_CHARACTERS


def _write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("questions", "pack", "chats", "ship"))
    parser.add_argument("--chats", type=Path, help="chats, one JSON object a line; .gz too")
    parser.add_argument("--answers", type=Path, help="what regenerate wrote, or what pack wrote; of ship: the head")
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--limit", type=int, default=0, help="0: all")
    parser.add_argument("--reserved", action="store_true", help="of the prompts that are kept for evaluation")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    if args.chats is None and args.stage != "ship":
        parser.error("--chats is required")
    {"questions": questions, "pack": pack, "chats": chats, "ship": ship}[args.stage](args)


if __name__ == "__main__":
    run(main)
