#!/bin/sh
# Everything that wants a GPU, in one go; each part is resumable, the same command goes on. Not yet run on one: written and tried with
#
#     SHAPES=small CONTEXTS=64,128 NEW=16 DEVICE=cpu KERNELS=auto sh runs/gpu.sh
#
# On a GPU (bfloat16; kernels on: whole cycles as CUDA graphs; compile: with compiled layers; off: without either):
#
#     sh runs/gpu.sh
#
# Rates of acceptance are published ones: EAGLE-1's n-alpha for Vicuna 7B (table 1), Mixtral 8x7B (table 3).
set -eu
OUT=${OUT:-out/gpu}
PYTHON=${PYTHON:-.venv/bin/python}
DEVICE=${DEVICE:-cuda}
SHAPES=${SHAPES:-llama-7b llama-8b mixtral-8x7b}
CONTEXTS=${CONTEXTS:-1024,4096,8192,16384}
KERNELS=${KERNELS:-off on compile}
NEW=${NEW:-128}
ROWS=${ROWS:-1,2,4,8,16}
DENSE=0.79,0.74,0.72,0.73,0.67
EXPERTS=0.67,0.62,0.61,0.64,0.63
# EAGLE-3 with 8 levels and 60 nodes, a smaller tree, a chain of 5; all with random heads of the target's own layer shape.
METHODS=eagle3:head=random:tree.nodes=60:tree.depth=8:tree.branch=10,eagle3:head=random:tree.nodes=32:tree.depth=6:tree.branch=8,eagle1:head=random:tree.choices=chain-5

mkdir -p "$OUT"
"$PYTHON" -m eyas doctor --json > "$OUT/doctor.json" || true
"$PYTHON" -m eyas generate "Hello" --device "$DEVICE" --max-new-tokens 1 > "$OUT/hello.txt" 2>&1 || { cat "$OUT/hello.txt" >&2; exit 2; }  # before 13 GB are made
for kernels in $KERNELS; do
    for shape in $SHAPES; do
        "$PYTHON" runs/random_target.py --shape "$shape" --contexts "$CONTEXTS" --output "$OUT/$shape"
        case $shape in mixtral*) rates=$EXPERTS ;; *) rates=$DENSE ;; esac
        for context in $(echo "$CONTEXTS" | tr , ' '); do
            echo "==> $shape, context $context, kernels $kernels"
            "$PYTHON" -m eyas bench --target "$OUT/$shape" --device "$DEVICE" --dtype bfloat16 --kernels "$kernels" --prompts "$OUT/$shape/prompts-$context.jsonl" \
                --methods "$METHODS" --simulate-acceptance "$rates" --max-new-tokens "$NEW" --output "$OUT/$shape-$context-$kernels"
            if [ "$kernels" != off ] && [ "$DEVICE" = cuda ]; then
                echo "==> the same, drafts in fp8"
                "$PYTHON" -m eyas bench --target "$OUT/$shape" --device "$DEVICE" --dtype bfloat16 --kernels "$kernels" --draft-weights fp8 \
                    --prompts "$OUT/$shape/prompts-$context.jsonl" --methods "$METHODS" --simulate-acceptance "$rates" --max-new-tokens "$NEW" \
                    --output "$OUT/$shape-$context-$kernels-fp8"
            fi
        done
        echo "==> $shape, many rows, kernels $kernels"
        "$PYTHON" runs/gpu_batch.py --target "$OUT/$shape" --device "$DEVICE" --kernels "$kernels" --context "${CONTEXTS%%,*}" --rows "$ROWS" \
            --rates "$rates" --new "$NEW" --output "$OUT/$shape-$kernels-batch.json"
    done
    echo "==> the embedded model, its own heads, kernels $kernels"
    "$PYTHON" -m eyas bench --device "$DEVICE" --kernels "$kernels" --limit "${LIMIT:-24}" --max-new-tokens "$NEW" --output "$OUT/embedded-$kernels" \
        --methods "eagle3:tree.nodes=26:tree.depth=5:tree.branch=4,eagle2:tree.nodes=26:tree.depth=5:tree.branch=4,eagle3:tree=auto"
done
"$PYTHON" runs/results.py --gpu "$OUT" | tee "$OUT/tables.md"
