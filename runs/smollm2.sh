#!/usr/bin/env bash
# How the MTP head of SmolLM2-135M-Instruct was made: from its own answers to questions of chats. Every step
# goes on where it was; what is there is not made again. runs/gpu_head.py made the EAGLE-3 head that is shipped.
#     DATA=FOLDER runs/smollm2.sh answers a    # 3,500 greedy answers into runs/answers (hours)
#     DATA=FOLDER runs/smollm2.sh answers b    # 3,500 more, sampled at temperature 1
#     DATA=FOLDER runs/smollm2.sh answers 0    # 4,000 greedy answers to general prompts; 1: at temperature 1; 2, 3, ...: in turn
#     DATA=FOLDER runs/smollm2.sh pack a       # keep what an interrupted run has made so far
#     DATA=FOLDER runs/smollm2.sh features     # what the heads read, from all packed answers and some chats
#     DATA=FOLDER runs/smollm2.sh train eagle3 # or mtp (hours)
#     DATA=FOLDER runs/smollm2.sh ship eagle3  # into the package eyas-tiny
#     DATA=FOLDER runs/smollm2.sh edge         # heads trained in other ways on TOKENS tokens each, compared (an hour)
#     DATA=FOLDER runs/smollm2.sh bench int8   # or float32, int4: the papers' six tasks, T = 0 and 1 (LIMIT prompts in all)
# THREADS: CPU threads of a step. TOKENS, LR: of the training; EVALUATE: steps between evaluations, which decode some answers.
set -euo pipefail
: "${DATA:?folder with train/ and eval/}"
OUT=${OUT:-out/smollm2}
PYTHON=${PYTHON:-.venv/bin/python}
THREADS=${THREADS:-$(nproc)}
export OMP_NUM_THREADS=$THREADS
CHATS=$DATA/train/chat.jsonl.gz
PROMPTS=$DATA/train/prompts.jsonl.gz
GENERAL=4000 # prompts of a part of general ones
mkdir -p "$OUT" runs/answers

answers() { # PART
  local sampling=(--temperature 0)
  case $1 in
  a) skip=0 limit=3500 ;;
  b) skip=3500 limit=3500 sampling=(--temperature 1 --seed 2) ;;
  c) skip=7000 limit=3500 ;;
  d) skip=10500 limit=3500 sampling=(--temperature 1 --seed 4) ;;
  *[13579]) skip=$(($1 * GENERAL)) limit=$GENERAL sampling=(--temperature 1 --seed $((10 + $1))) ;;
  *[02468]) skip=$(($1 * GENERAL)) limit=$GENERAL ;;
  *) echo "the parts are a, b, c, d and numbers" >&2 && return 2 ;;
  esac
  [ -f "$OUT/questions_$1.jsonl" ] ||
    "$PYTHON" runs/smollm2.py questions --chats "$(asked "$1")" --skip $skip --limit $limit \
      --answers "$(packed "$1")" --output "$OUT/questions_$1.jsonl"
  "$PYTHON" -m eyas regenerate --target smollm2-q4_1 --method vanilla --data "$OUT/questions_$1.jsonl" --output "$OUT/own_$1.jsonl" \
    --rows 64 --max-new-tokens 384 "${sampling[@]}" ${ROUNDED:-}
  pack "$1"
}

asked() { # the file that has a part's questions
  case $1 in [a-d]) echo "$CHATS" ;; *) echo "$PROMPTS" ;; esac
}

packed() { # the file that keeps a part's answers
  case $1 in [a-d]) echo "runs/answers/smollm2_$1.npz" ;; *) echo "runs/answers/general_$1.npz" ;; esac
}

pack() { # PART
  "$PYTHON" runs/smollm2.py pack --chats "$(asked "$1")" --answers "$OUT/own_$1.jsonl" --output "$(packed "$1")"
}

data() { # the options that name all chats to learn from
  for part in ${PARTS:-a b c d 0 1}; do
    "$PYTHON" runs/smollm2.py chats --chats "$(asked "$part")" --answers "$(packed "$part")" --output "$OUT/chats_$part.jsonl" >&2
    echo --data "$OUT/chats_$part.jsonl"
  done
}

case ${1:-} in
answers) answers "${2:?part}" ;;
pack) pack "${2:?part}" ;;
features)
  # shellcheck disable=SC2046
  "$PYTHON" -m eyas features --target smollm2-q4_1 --method eagle3,mtp $(data) --max-length 512 --heldout 0.01 --output "$OUT/features" --yes
  ;;
train)
  case ${2:?method} in
  eagle3) options=(--head.draft-vocab 8192 --ttt.steps 4) ;;
  mtp) options=(--ttt.steps 4) ;;
  *) echo "the methods are eagle3 and mtp" >&2 && exit 2 ;;
  esac
  "$PYTHON" -m eyas train --target smollm2-q4_1 --method "$2" --features "$OUT/features" --output "$OUT/$2" "${options[@]}" \
    --lr "${LR:-2e-3}" --tokens "${TOKENS:-3000000}" --batch-tokens 2048 --seed 1 --heldout-tokens 15000 --precision float32 \
    --save-every 25 --eval-every "${EVALUATE:-100}"
  ;;
edge)
  # name, method, options: what the head or its loss has that the first one has not
  while read -r name method options; do
    # shellcheck disable=SC2086
    "$PYTHON" -m eyas train --target smollm2-q4_1 --method "$method" --features "$OUT/features" --output "$OUT/edge/$name" $options \
      --lr "${LR:-2e-3}" --tokens "${TOKENS:-100000}" --batch-tokens 2048 --seed 1 --heldout-tokens 15000 --precision float32 \
      --save-every 25 --eval-every 0 </dev/null
    heads+=(--head "$name=$method:$OUT/edge/$name")
  done <<'HEADS'
eagle3 eagle3 --head.draft-vocab 8192 --ttt.steps 4
longer eagle3 --head.draft-vocab 8192 --ttt.steps 7
hybrid eagle3 --head.draft-vocab 8192 --ttt.steps 4 --ttt.objective hybrid
overlap eagle3 --head.draft-vocab 8192 --ttt.steps 4 --ttt.objective acceptance
mtp mtp --ttt.steps 4
dflash dflash --head.layers 2,15,27 --head.depth 2 --head.block 7 --train.anchors 48
pace dflash --head.layers 2,15,27 --head.depth 2 --head.block 7 --train.anchors 48 --train.weights pace
dflash2 dflash2 --head.layers 2,15,27 --head.depth 2 --head.block 7 --train.anchors 48 --head.selector-rank 64
HEADS
  "$PYTHON" runs/compare_heads.py --target smollm2-q4_1 "${heads[@]}" --limit "${LIMIT:-24}" --max-new-tokens 64 --trees 12/4/4 \
    --output docs/results/smollm2_edge.json
  ;;
bench)
  case ${2:?weights} in
  float32) rounded=() ;;
  int8) rounded=(--weights int8 --activations int16) ;;
  int4) rounded=(--weights int4 --activations int16) ;;
  *) echo "the weights are float32, int8 and int4" >&2 && exit 2 ;;
  esac
  "$PYTHON" -m eyas bench --target smollm2-q4_1 --tasks "eagle:$DATA/eval/eagle" --limit "${LIMIT:-6}" --max-new-tokens 64 --probe 0 \
    --methods "${METHODS:-prompt_lookup:tree=auto,eagle3}" --temperature 0 --temperature 1 \
    --output "$OUT/bench_$2" "${rounded[@]}" ${HEAD:+--draft "eagle3=$HEAD"}
  ;;
ship)
  "$PYTHON" runs/smollm2.py ship --answers "$OUT/${2:?method}" --output "tiny/eyas_tiny/weights/smollm2_$2"
  ;;
*)
  sed -n '2,15s/^# \?//p' "$0" >&2
  exit 2
  ;;
esac
