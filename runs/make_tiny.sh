#!/usr/bin/env bash
# How the embedded model and its heads were made. DATA holds train/ (chat.jsonl.gz, stories.txt.gz, novels_30.txt.gz) and eval/; any JSONL of
# chats and any texts will do. START is the model that training began from (see tiny/eyas_tiny/weights/README.md); leave it empty to begin anew.
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
"$PY" runs/make_tiny.py quantise --model "$OUT/run/model" --output tiny/eyas_tiny/weights
# the heads, on the quantised model: EAGLE-1/2
"$PY" -m eyas train --method eagle1 --data "$DATA/train/chat.jsonl.gz" --output "$OUT/head" --lr 2e-3 --tokens "${HEAD_TOKENS:-2400000}" \
  --max-length 512 --batch-tokens 4096 --eval-every 150 --save-every 50 --heldout 0.005 --heldout-tokens 20000 --seed 1
"$PY" runs/make_tiny.py head --model "$OUT/head" --output tiny/eyas_tiny/weights/eagle1
# EAGLE-3 (what was run took the rates of longer schedules and stopped; these commands give the same rates). Its second stage gives every
# head of the layer keys and values of its own: the token's embedding reaches the next state through them alone.
HEAD3=(--method eagle3 --data "$DATA/train/chat.jsonl.gz" --ttt.steps 5 --batch-tokens 2048 --max-length 512 --heldout 0.005
  --heldout-tokens 20000 --precision float32 --save-every 25)
"$PY" -m eyas train "${HEAD3[@]}" --head.draft-vocab 4096 --output "$OUT/head3a" --lr 3.5e-3 --schedule constant --warmup-steps 30 --steps 510 --seed 1 --eval-every 0
"$PY" runs/make_tiny.py widen --model "$OUT/head3a" --output "$OUT/head3w"
"$PY" -m eyas train "${HEAD3[@]}" --init "$OUT/head3w" --output "$OUT/head3b" --lr 3.5e-3 --min-lr-share 0.782 --warmup-steps 5 --steps 233 --seed 2 --eval-every 0
"$PY" -m eyas train "${HEAD3[@]}" --init "$OUT/head3b" --output "$OUT/head3" --lr 2.9e-3 --warmup-steps 5 --steps 400 --seed 3
# the fourth stage read features from disk (a subset of 2.3M tokens, passed over one and a half times; the command below reads as many tokens, not the very same ones)
"$PY" -m eyas train "${HEAD3[@]}" --init "$OUT/head3" --output "$OUT/head3d" --lr 3e-3 --warmup-steps 40 --tokens 3400000 --seed 4 --eval-every 400
# the whole vocabulary: rows for the 4,096 tokens that were missing, then the target's own answers, sampled and greedy, to questions of chats
# that are not among the held-in ones (what was run had 1,750 and 620 of these conversations in its first part)
"$PY" runs/make_tiny.py extend --model "$OUT/head3d" --output "$OUT/head3e"
QUESTIONS=(--chat "$DATA/train/chat.jsonl.gz" --without "$DATA/eval/chat_heldin_300.jsonl.gz" --seed 21)
"$PY" runs/make_tiny.py questions "${QUESTIONS[@]}" --limit 2914 --output "$OUT/questions_t1.jsonl"
"$PY" runs/make_tiny.py questions "${QUESTIONS[@]}" --skip 16000 --limit 1200 --output "$OUT/questions_t0.jsonl"
"$PY" -m eyas regenerate --data "$OUT/questions_t1.jsonl" --temperature 1 --seed 1 --max-new-tokens 128 --output "$OUT/own_t1.jsonl"
"$PY" -m eyas regenerate --data "$OUT/questions_t0.jsonl" --max-new-tokens 128 --output "$OUT/own_t0.jsonl"
OWN=(--method eagle3 --data "$OUT/own_t1.jsonl" --data "$OUT/own_t0.jsonl" --ttt.steps 4 --batch-tokens 1024 --max-length 512 --heldout 0.02
  --precision float32 --save-every 10 --min-lr-share 0.02 --eval-every 0)
"$PY" -m eyas train "${OWN[@]}" --init "$OUT/head3e" --output "$OUT/head3f" --lr 7e-4 --warmup-steps 5 --steps 150 --seed 23 --heldout-tokens 8000
"$PY" -m eyas train "${OWN[@]}" --init "$OUT/head3f" --output "$OUT/head3g" --lr 6e-4 --warmup-steps 10 --steps 500 --seed 24 --heldout-tokens 12000
"$PY" runs/make_tiny.py head --model "$OUT/head3g" --output tiny/eyas_tiny/weights/eagle3
# the MTP module, from a new one under the target's own lm_head: two stages on one chat of 32, then three passes over chats and own answers
# (what was run had other chats of these files: 2,000 and 596 own answers to questions, and 4,126 chats)
zcat "$DATA/train/chat.jsonl.gz" | awk 'NR % 32 == 1' > "$OUT/chat32.jsonl"
zcat "$DATA/train/chat.jsonl.gz" | awk 'NR % 16 == 9' > "$OUT/chat16.jsonl"
MTP=(--method mtp --ttt.steps 4 --batch-tokens 2048 --heldout-tokens 20000 --precision float32 --save-every 60)
"$PY" -m eyas features --method mtp --data "$OUT/chat32.jsonl" --max-length 512 --output "$OUT/features32"
"$PY" -m eyas features --method mtp --data "$OUT/own_t1.jsonl" --data "$OUT/own_t0.jsonl" --data "$OUT/chat32.jsonl" --data "$OUT/chat16.jsonl" \
  --max-length 512 --heldout 0.01 --output "$OUT/features_mtp"
"$PY" -m eyas train "${MTP[@]}" --features "$OUT/features32" --output "$OUT/mtp1" --tokens 300000 --seed 1 --lr 3e-3
"$PY" -m eyas train "${MTP[@]}" --features "$OUT/features32" --init "$OUT/mtp1" --output "$OUT/mtp2" --tokens 600000 --lr 2e-3 --min-lr-share 0.1
"$PY" -m eyas train "${MTP[@]}" --features "$OUT/features_mtp" --init "$OUT/mtp2" --output "$OUT/mtp" --tokens 4200000 --seed 4 --lr 2.5e-3 \
  --min-lr-share 0.02 --warmup-steps 40
"$PY" runs/make_tiny.py head --model "$OUT/mtp" --output tiny/eyas_tiny/weights/mtp
"$PY" runs/make_tiny.py report --chat "$DATA/eval/chat_heldin_300.jsonl.gz" --output docs/results/tiny.json
