#!/usr/bin/env bash
# Drafters of today beside EAGLE-3: six heads of the embedded model, each trained on the same 300,000
# tokens in the same order, then compared on held-in chats (tau, time of a draft, tokens per second).
#     DATA=FOLDER runs/drafters.sh heads             # two at a time, on a thread each; goes on where it was
#     DATA=FOLDER runs/drafters.sh heads eagle3 mtp  # these only
#     DATA=FOLDER runs/drafters.sh compare           # those that are there, on a machine that does nothing else
#     DATA=FOLDER runs/drafters.sh pictures          # a draft tree of every method, for its page
# TOKENS changes the number of training tokens.
set -euo pipefail
: "${DATA:?folder with train/ and eval/}"
OUT=${OUT:-out/drafters}
PYTHON=${PYTHON:-.venv/bin/python}
mkdir -p "$OUT"

# name, method, learning rate, and the options of the head and its loss
HEADS="
eagle3    eagle3  3e-3  --ttt.steps 4
two       eagle3  3e-3  --ttt.steps 4 --head.depth 2
mtp       mtp     3e-3  --ttt.steps 4
peagle    peagle  2e-3  --head.depth 2 --head.levels 6
dflash    dflash  2e-3  --head.depth 2 --head.block 7 --train.anchors 48
dspark    dspark  2e-3  --head.depth 2 --head.block 6 --train.anchors 48
"
# for the pictures of the methods' pages only
OTHERS="
medusa       medusa       1e-3  --objective distribution
hydra        hydra        1e-3  --objective distribution
small_model  small_model  3e-3
"

train() { # NAME METHOD RATE OPTIONS...
  local name=$1 method=$2 rate=$3
  shift 3
  if ! "$PYTHON" -m eyas train --features "$OUT/features" --method "$method" --output "$OUT/$name" --lr "$rate" "$@" \
      --tokens ${TOKENS:-300000} --batch-tokens 2048 --seed 1 --min-lr-share 0.05 --heldout-tokens 10000 --eval-every 0 --save-every 40 \
      --precision float32 >"$OUT/$name.log" 2>&1; then
    echo "$name failed: see $OUT/$name.log" >&2
    return 1
  fi
  echo "$name: $OUT/$name"
}

stage=${1:-}
shift || true
case $stage in
heads)
  [ -f "$OUT/chats.jsonl" ] || zcat "$DATA/train/chat.jsonl.gz" | awk 'NR % 24 == 1' >"$OUT/chats.jsonl"
  "$PYTHON" -m eyas features --method eagle3,mtp,peagle,dflash,dspark --data "$OUT/chats.jsonl" --max-length 512 \
    --heldout 0.02 --output "$OUT/features" --yes
  export -f train
  export OUT PYTHON OMP_NUM_THREADS=1
  export TOKENS=${TOKENS:-300000}
  grep . <<<"$HEADS$OTHERS" | awk -v names=" $* " 'names == "  " || index(names, " " $1 " ")' | xargs -P 2 -I{} bash -c 'train {}'
  ;;
compare)
  options=()
  while read -r name method _; do
    if [ -f "$OUT/$name/config.json" ]; then options+=(--head "$name=$method:$OUT/$name"); fi
  done <<<"$(grep . <<<"$HEADS")"
  "$PYTHON" runs/compare_heads.py "${options[@]}" --chats "$DATA/eval/chat_heldin_300.jsonl.gz" --limit 24 --max-new-tokens 64 \
    --speed --output docs/results/drafters.json
  ;;
pictures)
  [ -d "$OUT/datastore" ] || "$PYTHON" -m eyas datastore build --data "$OUT/chats.jsonl" --output "$OUT/datastore"
  "$PYTHON" runs/draw_tree.py --methods --heads "$OUT"
  ;;
*)
  sed -n '2,8s/^# \?//p' "$0" >&2
  exit 2
  ;;
esac
