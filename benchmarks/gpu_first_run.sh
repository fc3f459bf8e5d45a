#!/usr/bin/env bash
# Tests and measurements on a GPU, in parts of less than ten minutes each: bash benchmarks/gpu_first_run.sh PART [FOLDER]
#
#   new         checks that have not run on a GPU yet: a server, CUDA graphs of images and of many batch shapes, tests of
#               code that changed after the last run on a GPU, two GPUs if the machine has them, and profiles by ncu if
#               ncu is installed
#   mixed       eight minutes of mixed requests to LLM and to a server: host and device memory each minute
#   tests       conformance, determinism, graphs and streams, models; `penstock env` and `penstock bench run`
#   figures     cold start, decode, prefill, 256 requests with and without overlapped steps, transformers; prints each
#               figure with its target
#   quantized   decode with quantized weights and caches, and their quality
#
# Needs torch with CUDA, triton, and the packages that the first lines of the output list as missing. The C++ kernels are
# not needed. Each command has a time limit. `new` and `mixed` together take at most 19 minutes, all parts at most 38.
# The output of each command is written to a file in FOLDER (default: ./gpu-run), and its last line is printed. Weights are
# written to $WEIGHTS (default: a folder in /dev/shm if 40 GiB are free there, otherwise a temporary folder). The weights
# of the 8b shape take 15 GiB.
set -u
cd "$(dirname "$0")/.."
part=${1:?new, mixed, tests, figures or quantized} out=${2:-gpu-run}
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
server = ["fastapi", "httpx", "multipart", "prometheus_client", "uvicorn", "zmq"]
groups = {"all": needed, "tests": tests, "server": server}
missing = {what: [name for name in names if find_spec(name) is None] for what, names in groups.items()}
print("missing packages:", missing)
for name in ("torch", "triton", "transformers"):
    if find_spec(name):
        print(name, __import__(name).__version__)
import torch

print(sys.version.split()[0], torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU")
END
case $part in
tests)
  # The tests run in several processes, because compiling Triton programs takes most of the time and uses one core.
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
  # Both commands run at the same time, because each takes eight minutes. The server starts first, because the server
  # needs less memory than the other command.
  run 570 server-memory "$python" benchmarks/server_memory.py --minutes 8 --devices "$devices" &
  sleep 25
  measure 530 mixed 0.6b mixed --minutes 7.5
  wait
  cat "$out/server-memory.log"
  ;;
new)
  run 150 server "$python" benchmarks/server_memory.py --minutes 0.5 --interval 10 --devices "$devices"
  cat "$out/server.log"
  check 130 new-gpu tests/kernels/cuda/test_gpu.py
  changed="tests/kernels/test_conformance.py tests/kernels/test_determinism.py tests/llm/test_llm_answers.py"
  changed+=" tests/architectures/test_vision_parity.py tests/architectures/test_llava.py tests/lora/test_batches.py"
  check 150 new-changed $changed
  grep -E '^(FAILED|ERROR)' -h "$out"/new-*.log | cut -c-150 | head -n 40
  if [ "$($python -c 'import torch; print(torch.cuda.device_count())')" -ge 2 ]; then
    measure 80 two-gpus 0.6b decode load --ranks 2
  else
    echo "two-gpus: not run, there are not two GPUs"
  fi
  if command -v ncu >/dev/null; then
    for work in products attention sampling; do
      run 30 "ncu-$work" ncu --launch-skip 20 --launch-count 40 --section SpeedOfLight --section Occupancy \
        "$python" benchmarks/gpu_kernels.py "$work" --encodings bfloat16 int4 --rows 1
    done
  else
    echo "ncu: not run, it is not installed"
  fi
  ;;
*)
  echo "unknown part $part" >&2
  exit 2
  ;;
esac
