#!/bin/sh
# Everything that docs/performance.md says of the peers: one JSON file a comparison, a table, a plot.
#
#     benchmarks/peers/all.sh OUT [PAIRS]
#
# The machine must do nothing else. A file that is there already is not measured again: to go on after a stop,
# run it again; to measure one anew, delete it. With 7 pairs on two slow cores: decode and prefill take half an
# hour, cold starts 10 minutes, batches one hour, long contexts and memory another.
set -eu
out=${1:?where to put the JSON files}
pairs=${2:-7}
mkdir -p "$out"

contest() { # NAME PEER SHAPE OPTIONS...
    name=$1 peer=$2 shape=$3
    shift 3
    [ -e "$out/$name.json" ] ||
        python -m benchmarks.peers run "$peer" --shape "$shape" --pairs "$pairs" --json "$out/$name.json" "$@"
}

steps="--works decode --works prefill"
# shellcheck disable=SC2086 # several words each
for shape in l1b l110m; do
    for encoding in bfloat16 int8 int4; do
        for peer in llama_cpp openvino; do
            contest "$shape-$encoding-$peer" $peer $shape --encoding $encoding $steps
        done
    done
    contest "$shape-bfloat16-vllm" vllm $shape $steps
    for encoding in float32 int4; do
        contest "$shape-$encoding-max" max $shape --encoding $encoding $steps
    done
done
contest l1b-int4-openvino-int8 openvino l1b --encoding int4 --peer-encoding int8 --works prefill
for encoding in bfloat16 int8 int4; do
    for peer in llama_cpp openvino; do
        contest "l1b-$encoding-$peer-cold" $peer l1b --encoding $encoding --works cold
    done
done
contest l1b-bfloat16-vllm-batch vllm l1b --works batch
for encoding in bfloat16 int8; do
    contest "l1b-$encoding-openvino-batch" openvino l1b --encoding $encoding --works batch
done

pairs=3 # their runs are long, and spread little
for encoding in bfloat16 int8 int4; do
    for peer in llama_cpp openvino; do
        contest "l1b-$encoding-$peer-long" $peer l1b --encoding $encoding --works long
        contest "l1b-$encoding-$peer-memory" $peer l1b --encoding $encoding --works memory
    done
done
contest l1b-bfloat16-vllm-long vllm l1b --works long
contest l110m-bfloat16-transformers transformers l110m $steps

python -m benchmarks.peers table "$out"/*.json >"$out/table.md"
python -m benchmarks.peers plot "$out"/*.json --out "$out/peers.png"
cat "$out/table.md"
