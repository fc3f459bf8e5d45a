#!/usr/bin/env bash
# The first run on a GPU, in three parts of less than ten minutes each: bash benchmarks/gpu_first_run.sh PART [FOLDER]
#
#   tests       kernels, then models, on the GPU
#   figures     decode, prefill, many requests with and without overlap, cold start, transformers
#   mixed       eight minutes of mixed requests: growth of memory
#
# Needs torch with CUDA, triton, and the packages of the extras `dev` and `cuda`. The C++ kernels need not be built. Each
# command has a time limit, so that a part ends in time. Reports go to FOLDER (by default ./gpu-run).
set -u
cd "$(dirname "$0")/.."
part=${1:?tests, figures or mixed} out=${2:-gpu-run}
mkdir -p "$out"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
python=${PYTHON:-python3}

run() { # run SECONDS NAME COMMAND...
  local limit=$1 name=$2
  shift 2
  timeout "$limit" "$@" >"$out/$name.log" 2>&1
  echo "$name: exit status $?, $(tail -n 1 "$out/$name.log")"
}
check() { # check SECONDS NAME TESTS...
  local limit=$1 name=$2
  shift 2
  run "$limit" "$name" "$python" -m pytest -q -p no:cacheprovider -m gpu --timeout=300 --maxfail=20 "$@"
}
measure() { # measure SECONDS NAME ARGUMENTS...
  local limit=$1 name=$2
  shift 2
  run "$limit" "$name" "$python" benchmarks/gpu.py "$@"
}

$python -c "import sys, torch, triton, transformers
print(sys.version.split()[0], torch.__version__, triton.__version__, transformers.__version__,
      torch.cuda.get_device_name() if torch.cuda.is_available() else 'no GPU')" | tee "$out/versions.log"
case $part in
tests)
  check 240 kernels tests/kernels/cuda tests/kernels/test_conformance.py tests/kernels/test_encoder_attention.py
  check 90 experts tests/kernels/test_experts.py tests/kernels/test_convolution.py
  check 60 determinism tests/kernels/test_determinism.py
  check 150 models tests/architectures/test_parity.py tests/lora/test_batches.py tests/llm/test_llm.py \
    tests/pipelines/test_pipeline.py tests/pipelines/test_speculation_combined.py
  ;;
figures)
  measure 60 decode-0.6b decode --shape 0.6b
  measure 60 decode-1b decode --shape 1b
  measure 90 decode-8b decode --shape 8b
  measure 90 prefill-8b prefill --shape 8b
  measure 90 load load --shape 0.6b --requests 256
  measure 60 load-no-overlap load --shape 0.6b --requests 256 --no-overlap
  measure 40 start start --shape 0.6b
  measure 60 transformers transformers --shape 0.6b
  ;;
mixed)
  measure 560 mixed mixed --shape 0.6b --minutes 8
  ;;
*)
  echo "unknown part $part" >&2
  exit 2
  ;;
esac
