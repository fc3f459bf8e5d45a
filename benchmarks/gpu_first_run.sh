#!/usr/bin/env bash
# The first run on a GPU, in four parts of less than ten minutes each: bash benchmarks/gpu_first_run.sh PART [FOLDER]
#
#   tests       conformance, determinism, graphs and streams, models; `penstock env` and `penstock bench run`
#   figures     cold start, decode, prefill, 256 requests with and without overlap, transformers: each with its target
#   quantized   decode with quantized weights and caches, and their quality
#   mixed       eight minutes of mixed requests: growth of memory
#
# Needs torch with CUDA, triton, and the packages that the first lines of the output list as missing. The C++ kernels need
# not be built. Each command has a time limit, so that a part ends in time: together the parts take at most 29 minutes.
# Reports go to FOLDER (by default ./gpu-run), one file for each command, and their last lines to the output. Weights go
# to $WEIGHTS (by default a folder of the memory file system if it has room, else a temporary folder); 8 billion take 15 GiB.
set -u
cd "$(dirname "$0")/.."
part=${1:?tests, figures, quantized or mixed} out=${2:-gpu-run}
mkdir -p "$out"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
devices=${DEVICES:-gpu}
if [ -z "${WEIGHTS:-}" ]; then
  room=$(df --output=avail -BG /dev/shm 2>/dev/null | tail -n 1 | tr -dc 0-9)
  [ "${room:-0}" -ge 40 ] && WEIGHTS=/dev/shm/penstock-gpu-run || WEIGHTS=${TMPDIR:-/tmp}/penstock-gpu-run
fi

run() { # run SECONDS NAME COMMAND...
  local limit=$1 name=$2 begin=$SECONDS status
  shift 2
  timeout "$limit" "$@" >"$out/$name.log" 2>&1
  status=$?
  echo "$name: exit status $status after $((SECONDS - begin)) s, $(grep -v '^$' "$out/$name.log" | tail -n 1)"
}
# pytest-benchmark warns in each process of pytest-xdist, and tests turn warnings into errors.
plugins=(-p no:benchmark)
if $python -c 'import xdist' 2>/dev/null; then
  has_xdist=1
  plugins+=(-n "${PROCESSES:-$(nproc)}")
fi
check() { # check SECONDS NAME TESTS...
  local limit=$1 name=$2
  shift 2
  run "$limit" "$name" "$python" -m pytest -q -p no:cacheprovider "${plugins[@]}" -m gpu --timeout=300 "$@"
}
measure() { # measure SECONDS NAME SHAPE WORK...
  local limit=$1 name=$2 shape=$3
  shift 3
  run "$limit" "$name" "$python" benchmarks/gpu.py "$@" --shape "$shape" --devices "$devices" --folder "$WEIGHTS/$shape"
  grep -h '^{' "$out/$name.log" | sed 's/, "memory_plan".*/}/'
}

$python - <<'END' | tee "$out/versions.log"
import sys
from importlib.util import find_spec

needed = ["click", "huggingface_hub", "jinja2", "msgspec", "numpy", "rich", "safetensors", "tokenizers", "torch", "triton"]
tests = ["pytest", "pytest_timeout", "hypothesis", "transformers", "peft", "llguidance", "gguf"]
missing = {what: [name for name in names if find_spec(name) is None] for what, names in (("all", needed), ("tests", tests))}
print("missing packages:", missing)
for name in ("torch", "triton", "transformers"):
    if find_spec(name):
        print(name, __import__(name).__version__)
import torch

print(sys.version.split()[0], torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU")
END
case $part in
tests)
  # In several processes: most of the time goes into the compilation of programs, on one core each.
  run 60 env "$python" -m penstock env &
  kernels="tests/kernels" determinism="tests/architectures/test_invariance.py"
  models="tests/architectures/test_parity.py tests/architectures/test_encoder_parity.py"
  features="tests/lora/test_batches.py tests/llm/test_llm.py tests/pipelines/test_pipeline.py"
  features+=" tests/pipelines/test_speculation_combined.py tests/architectures/test_encodings.py"
  if [ -n "${has_xdist:-}" ]; then
    check 500 tests $kernels $determinism $models $features
  else
    for name in kernels determinism models features; do check 500 "tests-$name" ${!name} & done
  fi
  wait
  grep -E '^(FAILED|ERROR)' -h "$out"/tests*.log | cut -c-150 | head -n 60
  run 60 bench "$python" -m penstock bench run demo --work decode --repeats 2 --devices "$devices"
  ;;
figures)
  measure 100 0.6b 0.6b start decode load
  measure 55 0.6b-no-overlap 0.6b load --no-overlap
  measure 65 1b 1b decode
  measure 180 8b 8b decode prefill
  measure 60 transformers 0.6b transformers
  ;;
quantized)
  for encoding in int8 int4 fp8; do
    measure 45 "1b-$encoding" 1b decode --encoding "$encoding"
  done
  measure 45 1b-fp8-cache 1b decode --cache fp8
  run 80 quality "$python" benchmarks/quality.py --tokens 8192 --caches int8 fp8 --devices "$devices"
  tail -n 24 "$out/quality.log"
  ;;
mixed)
  measure 530 mixed 0.6b mixed --minutes 8
  ;;
*)
  echo "unknown part $part" >&2
  exit 2
  ;;
esac
