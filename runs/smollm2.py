"""The prompts and the answers that the heads of SmolLM2-135M-Instruct learned from, and the heads for its package.

    python runs/smollm2.py chats --chats CHAT.jsonl.gz --answers runs/answers/smollm2_a.npz --output out/smollm2/chats_a.jsonl
    python runs/smollm2.py ship --answers out/gpu_head/eagle3 --output tiny/eyas_tiny/weights/smollm2_eagle3

Files in runs/answers keep answers as token ids with the line of their question; `chats` joins both. `ship` puts a
trained head into the package eyas-tiny, its matrices in int8.
"""

from __future__ import annotations

import json
import random
import re
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from _common import open_text, run
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from eyas import named
from eyas.errors import InputError
from eyas.files import CHECKSUMS, from_int8, sha256_of_folder, to_int8, write_text

SOURCES = ("dolly_qa", "dolly_3k", "rasbt_instruction_1100", "gsm8k", "gpteacher_codegen", "gpteacher_roleplay")
MAX_CHARACTERS = 2500  # of a question
SEED = 34
TEMPLATES = "own_templates"  # prompts made from templates: broad in topic, narrow in wording
TEMPLATES_KEPT = 0.4  # the share of them that is asked
RESERVED = 2_000  # prompts at the end of the order, for evaluation: no answer to them is learnt from


def questions_in_order(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return (line, chat) of all questions, in the order that stays the same; the last ones are reserved."""
    lines = [(number, chat) for number, chat in read(path) if _is_question(chat)]
    chance = random.Random(SEED)
    chance.shuffle(lines)
    return [(number, chat) for number, chat in lines if chat["source"] != TEMPLATES or chance.random() < TEMPLATES_KEPT]


def read(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line, chat) of a JSONL file."""
    with open_text(path) as lines:
        for number, line in enumerate(lines):
            yield number, json.loads(line)


def answers_in(path: Path) -> dict[int, list[int]]:
    """Return packed answers by the line of their question."""
    kept = np.load(path, allow_pickle=False)
    answers = np.split(kept["ids"], np.cumsum(kept["length"])[:-1])
    return {number: ids.tolist() for number, ids in zip(kept["line"].tolist(), answers, strict=True)}


def _is_question(chat: dict[str, Any]) -> bool:
    turns = chat["conversations"]
    is_asked = len(turns) == 1 or chat["source"] in SOURCES
    return is_asked and turns[0]["role"] == "user" and len(turns[0]["content"]) < MAX_CHARACTERS


def chats(args: Namespace) -> None:
    """Write the chats of packed answers."""
    if args.chats is None:
        raise InputError("chats needs --chats: the file that has the questions")
    tokenizer, by_line, records = (
        AutoTokenizer.from_pretrained(named.place_of("smollm2-q4_1")),
        dict(read(args.chats)),
        [],
    )
    for number, ids in answers_in(args.answers).items():
        if number not in by_line:
            raise InputError(f"{args.chats} has no line {number}: give the file that the answers were made from")
        question = by_line[number]["conversations"][0]
        records.append({"messages": [question, {"role": "assistant", "content": tokenizer.decode(ids)}]})
    args.output.parent.mkdir(parents=True, exist_ok=True)
    write_text(args.output, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    print(f"{len(records):,} chats")


def ship(args: Namespace) -> None:
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


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("chats", "ship"))
    parser.add_argument("--chats", type=Path, help="of chats: the file of questions; .gz too")
    parser.add_argument("--answers", type=Path, required=True, help="packed answers; of ship: the head's folder")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    {"chats": chats, "ship": ship}[args.stage](args)


if __name__ == "__main__":
    run(main)
