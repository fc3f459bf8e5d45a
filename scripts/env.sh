# Other scripts source this file. This file changes to the root of the project, and creates or updates .venv with
# Penstock. PYTHON selects the Python interpreter; the default is the first usable interpreter. If the interpreter has
# torch, .venv uses the torch of the interpreter instead of installing torch. The output of pip is written to
# .venv/install.log.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
source scripts/share_torch.sh

say() { printf 'penstock: %s\n' "$*" >&2; }

find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3 python3.14 python3.13 python3.12 python3.11 python; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      printf '%s\n' "$candidate"
      return
    fi
    if [ "$candidate" = "${PYTHON:-}" ]; then break; fi
  done
  say "error: needs Python 3.11 or newer with venv (on Debian: apt install python3-venv). PYTHON=/path/to/python selects an interpreter"
  return 1
}

# Prints a checksum of the source folder and of all files that the installation depends on. If the checksum changes,
# Penstock is installed again.
fingerprint() {
  {
    pwd
    cat pyproject.toml constraints.txt CMakeLists.txt
    find penstock/kernels/cpu \( -path '*/csrc/*' -o -name CMakeLists.txt \) -type f -print0 | sort -z | xargs -0r cat
    sed -n 's/^__version__ = //p' penstock/__init__.py
  } | cksum
}

if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
  python=$(find_python)
  say "creating .venv with $("$python" --version)"
  "$python" -m venv --clear .venv
  share_torch "$python" .venv
fi

checksum=$(fingerprint)
if [ "$(cat .venv/installed 2>/dev/null || true)" != "$checksum" ]; then
  say "installing into .venv (the first time takes one or two minutes, because PyTorch is large)"
  library=penstock/kernels/cpu/libpenstock_cpu.so
  rm -f "$library" # a failed build must not leave the library of an earlier build
  if ! .venv/bin/python -m pip install -v --disable-pip-version-check --no-input \
    -c "$(constraints_of .venv)" -e '.[dev]' >.venv/install.log 2>&1; then
    tail -n 25 .venv/install.log >&2
    say "error: the installation failed. The output of pip is in $PWD/.venv/install.log"
    exit 1
  fi
  if [ -e penstock/kernels/cpu/CMakeLists.txt ] && [ ! -e "$library" ]; then
    say "warning: the C++ kernels were not built, and the reference kernels are slow. .venv/install.log has the reason. 'rm .venv/installed' makes the next run build them again"
  fi
  printf '%s\n' "$checksum" >.venv/installed
fi
