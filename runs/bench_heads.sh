#!/bin/sh
# The heads of other methods for the embedded target, which a bench compares with EAGLE's, into out/heads/STAGE.
#
#     make bench-heads DATA=CHATS.jsonl.gz               everything (hours on two cores)
#     make bench-heads FEATURES=FOLDER                   the same, from what `eyas features --method medusa` wrote
#     make bench-heads DATA=CHATS.jsonl.gz STAGES=medusa TOKENS=100000
#     eyas bench --draft small_model=out/heads/small_model ...    their use
#
# All stages read the target's final features, nothing else. The same command goes on where it was interrupted.
# Medusa's and Hydra's heads learn the target's distribution, as EAGLE's do, so a comparison is of heads and not of losses.
set -eu
OUT=${OUT:-out/heads}
PYTHON=${PYTHON:-.venv/bin/python}
STAGES=${STAGES:-small_model distillspec medusa hydra hydra++ kangaroo glide eagle1-shifted eagle1-unshifted eagle1-feature eagle1-token}
HEAD="--tokens ${TOKENS:-2000000} --eval-every 150"

for stage in $STAGES; do
    case $stage in
    # the role of Vicuna-68M beside Vicuna-7B: 1.8M parameters, 1.0M of them the table of tokens, beside 28.3M
    small_model) options="--method small_model --tokens ${TOKENS:-6000000} --lr 3e-3 --warmup-steps 10 --eval-every 200" ;;
    distillspec) options="--method distillspec --tokens ${TOKENS:-140000} --lr 4e-3 --warmup-steps 8 --eval-every 150" ;;
    medusa | hydra) options="--method $stage $HEAD --lr 1e-3 --objective distribution" ;;
    hydra++) options="--method hydra $HEAD --lr 1e-3 --objective distribution --head.arch prefix-mlp --head.blocks 4" ;;
    kangaroo | glide) options="--method $stage --tokens ${TOKENS:-120000} --lr 2e-3 --warmup-steps 8 --eval-every 150" ;;
    eagle1-*) options="--method eagle1 $HEAD --lr 2e-3 --head.inputs ${stage#eagle1-}" ;; # EAGLE-1's ablation of inputs
    *) echo "unknown stage $stage" >&2; exit 2 ;;
    esac
    if [ -n "${FEATURES:-}" ]; then
        set -- --features "$FEATURES"
    else
        set -- --data "${DATA:?chats, or FEATURES=FOLDER}" --max-length 512 --heldout 0.005
    fi
    echo "==> $stage"
    # shellcheck disable=SC2086 # options are words
    "$PYTHON" -m eyas train "$@" --output "$OUT/$stage" --batch-tokens 4096 --heldout-tokens 20000 --save-every 50 $options
done
