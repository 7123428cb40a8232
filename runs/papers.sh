#!/bin/sh
# The comparisons of the EAGLE papers at our scale: benches into out/papers; each writes its tables, too.
#
#     make bench-heads DATA=CHATS.jsonl           once: the heads of the other methods (runs/bench_heads.sh)
#     sh runs/papers.sh [SHARED]                  SHARED: the folder with data/eval and data/train (default: ../shared)
#     sh runs/papers.sh SHARED chats              one of: chats sampled more more_sampled six six_sampled spec_bench inputs nestling_heads nestling nestling_six
#
# Every bench is resumable: the same command goes on where it was interrupted. LIMIT scales them all (prompts of a task).
set -eu
SHARED=${1:-../shared}
STAGES=${2:-chats sampled more more_sampled six six_sampled spec_bench inputs nestling_heads nestling nestling_six}
OUT=${OUT:-out/papers}
HEADS=${HEADS:-out/heads}
PYTHON=${PYTHON:-.venv/bin/python}
EVAL=$SHARED/data/eval
NESTLING=${NESTLING:-$SHARED/models/nestling}
mkdir -p "$OUT"

# Trees of 26 nodes, root included, for every method that has trees; chains of five draft tokens for those that have none. EAGLE-2 and EAGLE-3 as
# the papers have them: sharpness 1.
TREE=tree.nodes=26:tree.depth=5:tree.branch=4:tree.confidence_temperature=1
EAGLES=eagle1:tree.choices=chain-5,eagle1:tree.choices=reference,eagle2:$TREE,eagle3:$TREE
HEADED=medusa:tree.choices=dynamic:tree.nodes=26,hydra:tree.choices=dynamic:tree.nodes=26
PLUS=hydra:head=hydra++:tree.choices=dynamic:tree.nodes=26
OTHERS=small_model:tree.choices=chain:depth=5,prompt_lookup,suffix,lookahead,self_speculative:tree.choices=chain:depth=5
REST=rest:datastore=$OUT/datastore:rest.nodes=26
ALL=$OTHERS,$REST,$HEADED,$PLUS,$EAGLES,eagle2:$TREE:draft_with=suffix
MORE=small_model:tree.choices=chain:depth=5,distillspec:tree.choices=chain:depth=5,cascade:depth=5:cascade.tail=0,cascade:depth=2:cascade.tail=3,spectr:depth=5,kangaroo:depth=5
MORE=$MORE,cascade:dynamic.nodes=26:dynamic.branch=4:depth=5:cascade.tail=0,glide:tree.nodes=26:tree.depth=5:tree.branch=4
MORE_HEADS="--heads $HEADS --draft cascade=$HEADS/small_model --draft spectr=$HEADS/small_model"
SIX=eagle:$EVAL/eagle
CHATS=$OUT/chats.jsonl

bench() { # NAME, then what eyas bench is given
    name=$1; shift
    echo "==> $name"
    "$PYTHON" -m eyas bench --output "$OUT/$name" "$@" > "$OUT/$name.log"
}

# The last user turn of each held-in chat, with what was said before it.
[ -f "$CHATS" ] || "$PYTHON" - "$EVAL/chat_heldin_300.jsonl.gz" "$CHATS" <<'PY'
import gzip, json, sys
with gzip.open(sys.argv[1], "rt") as source, open(sys.argv[2], "w") as out:
    for line in source:
        messages = json.loads(line)["conversations"]
        last = max(i for i, m in enumerate(messages) if m["role"] == "user")
        out.write(json.dumps({"messages": messages[: last + 1]}) + "\n")
PY
[ -d "$OUT/datastore" ] || "$PYTHON" -m eyas datastore build --data "$SHARED/data/train/chat.jsonl.gz" --output "$OUT/datastore"

for stage in $STAGES; do
    case $stage in
    chats) bench chats --prompts "$CHATS" --limit "${LIMIT:-40}" --max-new-tokens 64 --heads "$HEADS" --methods "$ALL" ;;
    sampled) bench sampled --prompts "$CHATS" --limit "${LIMIT:-40}" --max-new-tokens 64 --heads "$HEADS" --temperature 1 \
        --methods "small_model:tree.choices=chain:depth=5,$HEADED,$EAGLES" ;;
    more) bench more --prompts "$CHATS" --limit "${LIMIT:-12}" --max-new-tokens 64 --probe 0 $MORE_HEADS --methods "$MORE" ;;
    more_sampled) bench more_sampled --prompts "$CHATS" --limit "${LIMIT:-12}" --max-new-tokens 64 --probe 0 --temperature 1 $MORE_HEADS \
        --methods "$MORE,small_model:depth=5:verification=block,spectr:depth=5:drafts=8,kangaroo:depth=5:confidence=0.2" ;;
    six) bench six --tasks "$SIX" --limit "${LIMIT:-30}" --max-new-tokens 64 --heads "$HEADS" --methods "$ALL" ;;
    six_sampled) bench six_sampled --tasks "$SIX" --limit "${LIMIT:-30}" --max-new-tokens 64 --heads "$HEADS" --temperature 1 --methods "$HEADED,$EAGLES" ;;
    spec_bench) bench spec_bench --tasks "spec_bench:$EVAL/spec_bench/question.jsonl" --limit "${LIMIT:-24}" --max-new-tokens 64 \
        --heads "$HEADS" --methods "$OTHERS,$HEADED,$EAGLES" ;;
    inputs) bench inputs --prompts "$CHATS" --limit "${LIMIT:-40}" --max-new-tokens 64 --heads "$HEADS" --temperature 0 --temperature 1 \
        --methods "$(for i in shifted unshifted feature token; do printf 'eagle1:head=eagle1-%s:tree.choices=chain-5,' $i; done)" ;;
    nestling_heads) # warm-started from the embedded model's
        for head in eagle1:eagle2:2e-3:250000: eagle3:eagle3:1e-3:120000:--ttt.steps=4; do
            IFS=: read -r kind method rate tokens more <<EOF
$head
EOF
            "$PYTHON" -m eyas train --target "$NESTLING" --data "$SHARED/data/train/chat.jsonl.gz" --method "$method" --init "tiny/eyas_tiny/weights/$kind" \
                --output "$OUT/nestling_$kind" --tokens "$tokens" $more --batch-tokens 2048 --max-length 512 --lr "$rate" --warmup-steps 10 --heldout-tokens 10000 \
                --eval-every 1000 --save-every 40
        done ;;
    nestling) bench nestling --target "$NESTLING" --prompts "$CHATS" --limit "${LIMIT:-40}" --max-new-tokens 64 --temperature 0 --temperature 1 \
        --draft "eagle1=$OUT/nestling_eagle1" --draft "eagle2=$OUT/nestling_eagle1" --draft "eagle3=$OUT/nestling_eagle3" --methods "prompt_lookup,suffix,$EAGLES" ;;
    nestling_six) bench nestling_six --target "$NESTLING" --tasks "$SIX" --limit "${LIMIT:-30}" --max-new-tokens 64 --draft "eagle1=$OUT/nestling_eagle1" \
        --draft "eagle2=$OUT/nestling_eagle1" --draft "eagle3=$OUT/nestling_eagle3" --methods "prompt_lookup,suffix,$EAGLES" ;;
    *) echo "unknown stage $stage" >&2; exit 2 ;;
    esac
done
