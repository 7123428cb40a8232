"""Mean accepted length with the given head, and with one that learns from the texts before (`eyas_train.adapt`).

    python runs/adapt.py --chats CHATS.jsonl.gz --texts book=BOOK.txt.gz code=FOLDER --output docs/results/adapt.json

For each kind of text the same prompts are answered in the same order by the frozen head and by the learning one,
whose steps are made between the prompts: a prompt is answered by what was learnt from those before. The texts are
equal, as the trees are deterministic; that is checked. Kinds:

    chat   the chats, by the chat template: what the head was trained on
    NAME   passages of a text file, or of all files of a folder (--suffix), as they are
    long   the first of the texts again, with answers of --long tokens; there the steps are made within the answer, too

tau: tokens per cycle, prefill excluded. Intervals: 95 %, bootstrap over prompts (ratios of sums). `second half` counts
the later half of the prompts only. --share: seconds of learning per second of drafting; 0 does not bound it, which
shows what there is to learn. `spent` says what was used.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any

from _common import book_tokens, chat_prompts, interval, machine, parser, run, write
from rich.progress import track

import eyas
from eyas.adapt import adapting
from eyas.api import LLM
from eyas.errors import InputError
from eyas_lab.bench.intervals import ratio, ratio_of_ratios
from eyas_train.adapt import LearningLLM

REST_EVERY = 128  # tokens of a long answer between two pauses for steps
UNBOUNDED = 1e9


def main() -> None:
    """Measure all kinds and write the record."""
    made = parser(
        __doc__, chats=True, target=(None, "the target; default: the embedded model"),
        draft=(None, "its head"), method=("mtp", "mtp or eagle3"),
        texts=(["book=FILE"], "KIND=FILE or KIND=FOLDER, texts that the head was not trained on"),
        suffix=(".py", "files of a folder that are read"), prompts=(10, "prompts of each kind"),
        prompt_tokens=(64, "tokens of a passage"), new=(128, "tokens of an answer"), long=(0, "tokens of a long answer"),
        share=(0.0, "seconds of learning per second of drafting; 0: no bound"), lr=(1e-4, "the learning rate"),
        temperature=(0.0, "of the answers"), tree=("16/5/3", "nodes/depth/branch of the tree"),
    )  # fmt: skip
    args = made.parse_args()
    before = machine()
    nodes, depth, branch = map(int, args.tree.split("/"))
    tree = {"nodes": nodes, "depth": depth, "branch": branch}
    llm = eyas.load(args.target, args.draft, args.method, tree=tree)
    kinds: dict[str, tuple[list[Any], int]] = {
        "chat": ([prompt.messages for prompt in chat_prompts(args.chats, args.prompts)], args.new)
    }
    for text in args.texts:
        kind, _, path = text.partition("=")
        kinds[kind] = passages(llm, Path(path), args.suffix, args.prompts, args.prompt_tokens), args.new
    if args.long:
        first = next(kind for kind in kinds if kind != "chat")
        kinds["long"] = kinds[first][0], args.long
    figures = {kind: compared(llm, kind, prompts, new, args) for kind, (prompts, new) in kinds.items()}
    settings = {
        "target": llm.target.name, "method": llm.method, "tree": tree, "temperature": args.temperature,
        "share": args.share, "lr": args.lr, "prompts": args.prompts,
    }  # fmt: skip
    write(args.output, {"settings": settings, "kinds": figures}, before)


def passages(llm: LLM, path: Path, suffix: str, count: int, length: int) -> list[list[int]]:
    """Return passages of so many tokens, spread over a text."""
    files = sorted(path.rglob(f"*{suffix}")) if path.is_dir() else [path]
    tokens = [token for file in files for token in book_tokens(llm, file)]
    if len(tokens) < count * length:
        raise InputError(f"{path} has {len(tokens)} tokens, too few for {count} passages of {length}")
    return [tokens[i * len(tokens) // count :][:length] for i in range(count)]


def compared(llm: LLM, kind: str, prompts: Sequence[Any], new: int, args: Any) -> dict[str, Any]:
    """Return the figures of one kind of text."""
    columns: list[list[float]] = [[], [], [], []]  # tokens and cycles, learning and frozen
    keywords = {"max_new_tokens": new, "ignore_eos": True, "temperature": args.temperature}
    own = LLM(llm.target, copy(llm.drafter), llm.tokenizer, llm.draft_name)  # what learns leaves `llm` as it is
    learning = adapting(own, share=args.share or UNBOUNDED, lr=args.lr)
    for number, prompt in enumerate(track(prompts, kind)):
        texts = []
        for place, one in ((0, learning), (2, llm)):
            tokens, cycles, ids = answered(one, prompt, {**keywords, "seed": number})
            columns[place].append(tokens)
            columns[place + 1].append(cycles)
            texts.append(ids)
        assert texts[0] == texts[1], f"{kind} {number}: the texts differ"
    half = [column[len(prompts) // 2 :] for column in columns]
    return {
        "tokens": new,
        "frozen": interval(ratio, columns[2], columns[3]),
        "learning": interval(ratio, columns[0], columns[1]),
        "gain": interval(ratio_of_ratios, *columns),
        "second half": {"frozen": interval(ratio, *half[2:]), "learning": interval(ratio, *half[:2]),
                        "gain": interval(ratio_of_ratios, *half)},
        "learnt": learning.learner.figures(),
        "spent": round(learning.learner.spent / learning.learner.served, 3),
    }  # fmt: skip


def answered(llm: LLM, prompt: Any, keywords: dict[str, Any]) -> tuple[int, int, list[int]]:
    """Return the tokens of cycles, the cycles, and the ids of an answer."""
    stream, since = llm.stream(prompt, **keywords), 0
    for piece in stream:
        since += len(piece.token_ids)
        if isinstance(llm, LearningLLM) and since >= REST_EVERY:
            since = 0
            while llm.learner.rest():
                pass
    result = stream.result()
    return result.stats.tokens, result.stats.cycles, list(result.token_ids)


if __name__ == "__main__":
    run(main)
