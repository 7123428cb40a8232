#!/usr/bin/env bash
# How the embedded model and its head were made. DATA holds train/ (chat.jsonl.gz, stories.txt.gz, novels_30.txt.gz) and eval/; any JSONL of
# chats and any texts will do. START is the model that training began from (see src/eyas/tiny/weights/README.md); leave it empty to begin anew.
#     DATA=../shared/data START=../shared/models/nestling runs/make_tiny.sh
set -euo pipefail
: "${DATA:?folder with train/ and eval/}"
START=${START:-}
OUT=${OUT:-out/tiny}
PY=${PY:-.venv/bin/python}
export MALLOC_MMAP_THRESHOLD_=8589934592 MALLOC_TRIM_THRESHOLD_=8589934592 MALLOC_TOP_PAD_=268435456  # fewer page faults
TEXT=("$DATA/train/stories.txt.gz" "$DATA/train/novels_30.txt.gz")

if [ -z "$START" ]; then
  "$PY" runs/make_tiny.py tokenizer --chat "$DATA/train/chat.jsonl.gz" --text "${TEXT[@]}" --output "$OUT/base"
  "$PY" runs/make_tiny.py tokens --model "$OUT/base" --chat "$DATA/train/chat.jsonl.gz" --text "${TEXT[@]}" --output "$OUT/tokens"
  "$PY" runs/make_tiny.py pretrain --compile --tokens "$OUT/tokens" --model "$OUT/base" --init random --lr 2e-3 --minutes 75 --long-minutes 15 --output "$OUT/run"
else
  "$PY" runs/make_tiny.py tokens --model "$START" --chat "$DATA/train/chat.jsonl.gz" --text "${TEXT[@]}" --output "$OUT/tokens"
  "$PY" runs/make_tiny.py pretrain --compile --tokens "$OUT/tokens" --model "$START" --init model --lr 1.2e-3 --minutes 48 --long-minutes 12 --seed 7 --output "$OUT/run"
fi
"$PY" runs/make_tiny.py quantise --model "$OUT/run/model" --output src/eyas/tiny/weights
# the head, on the quantised model
"$PY" -m eyas train --method eagle1 --data "$DATA/train/chat.jsonl.gz" --output "$OUT/head" --lr 2e-3 --tokens "${HEAD_TOKENS:-2400000}" \
  --max-length 512 --batch-tokens 4096 --eval-every 150 --save-every 50 --heldout 0.005 --heldout-tokens 20000 --seed 1
"$PY" runs/make_tiny.py head --model "$OUT/head" --output src/eyas/tiny/weights/eagle1
"$PY" runs/make_tiny.py report --chat "$DATA/eval/chat_heldin_300.jsonl.gz" --output docs/results/tiny.json
