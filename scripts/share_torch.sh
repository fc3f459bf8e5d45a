# scripts/env.sh and scripts/wheel source this file in the root of the project.

# share_torch PYTHON VENV: if PYTHON has torch, makes its packages importable in the environment VENV. The
# torch build that is installed on this machine is then used and not downloaded again.
share_torch() {
  local folder
  if folder=$("$1" -c 'import torch, pathlib; print(pathlib.Path(torch.__file__).parents[1])' 2>/dev/null); then
    # A .pth file instead of --system-site-packages, because PYTHON may itself be a virtual environment.
    "$2/bin/python" -c 'import sys, sysconfig; open(sysconfig.get_path("purelib") + "/shared_torch.pth", "w").write(sys.argv[1] + "\n")' "$folder"
    printf 'penstock: using the torch in %s\n' "$folder" >&2
  fi
}

# constraints_of VENV: prints the path of the constraints file for pip. The file omits torch if VENV shares a torch.
constraints_of() {
  if compgen -G "$1/lib/python*/site-packages/shared_torch.pth" >/dev/null; then
    grep -v '^torch==' constraints.txt >"$1/constraints.txt"
    printf '%s\n' "$1/constraints.txt"
  else
    printf 'constraints.txt\n'
  fi
}
