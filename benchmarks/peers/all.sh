#!/bin/sh
# Measures all comparisons with other engines in docs/performance.md. Writes to OUT: one JSON file per comparison, the
# table table.md and the plot peers.png.
#
#     benchmarks/peers/all.sh OUT [PAIRS]
#
# The machine must be idle. The script skips comparisons whose file exists. To continue after an interruption, run the
# script again. To repeat a comparison, delete its file. With 7 pairs on two slow cores, decode and prefill take half
# an hour, cold starts 10 minutes, batches one hour, and long contexts and memory one hour.
set -eu
out=${1:?where to put the JSON files}
pairs=${2:-7}
mkdir -p "$out"

compare() { # NAME PEER SHAPE OPTIONS...
    name=$1 peer=$2 shape=$3
    shift 3
    [ -e "$out/$name.json" ] ||
        python -m benchmarks.peers run "$peer" --shape "$shape" --pairs "$pairs" --json "$out/$name.json" "$@"
}

steps="--works decode --works prefill"
# shellcheck disable=SC2086 # $steps is several words
for shape in l1b l110m; do
    for encoding in bfloat16 int8 int4; do
        for peer in llama_cpp openvino; do
            compare "$shape-$encoding-$peer" $peer $shape --encoding $encoding $steps
        done
    done
    compare "$shape-bfloat16-vllm" vllm $shape $steps
    for encoding in float32 int4; do
        compare "$shape-$encoding-max" max $shape --encoding $encoding $steps
    done
done
compare l1b-int4-openvino-int8 openvino l1b --encoding int4 --peer-encoding int8 --works prefill
for encoding in bfloat16 int8 int4; do
    for peer in llama_cpp openvino; do
        compare "l1b-$encoding-$peer-cold" $peer l1b --encoding $encoding --works cold
    done
done
compare l1b-bfloat16-vllm-batch vllm l1b --works batch
for encoding in bfloat16 int8; do
    compare "l1b-$encoding-openvino-batch" openvino l1b --encoding $encoding --works batch
done

pairs=3 # a run takes minutes, and results vary little
for encoding in bfloat16 int8 int4; do
    for peer in llama_cpp openvino; do
        compare "l1b-$encoding-$peer-long" $peer l1b --encoding $encoding --works long
        compare "l1b-$encoding-$peer-memory" $peer l1b --encoding $encoding --works memory
    done
done
compare l1b-bfloat16-vllm-long vllm l1b --works long
compare l110m-bfloat16-transformers transformers l110m $steps

python -m benchmarks.peers table "$out"/*.json >"$out/table.md"
python -m benchmarks.peers plot "$out"/*.json --out "$out/peers.png"
cat "$out/table.md"
