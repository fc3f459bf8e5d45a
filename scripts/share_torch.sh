# Sourced by env.sh and wheel, which stand in the project's root.

# share_torch PYTHON VENV: where PYTHON has a torch, the environment VENV sees what that Python sees, so that a
# torch chosen for this machine is neither replaced nor downloaded again.
share_torch() {
  local place
  if place=$("$1" -c 'import torch, pathlib; print(pathlib.Path(torch.__file__).parents[1])' 2>/dev/null); then
    # A .pth file, and not --system-site-packages: PYTHON may be of an environment itself.
    "$2/bin/python" -c 'import sys, sysconfig; open(sysconfig.get_path("purelib") + "/shared_torch.pth", "w").write(sys.argv[1] + "\n")' "$place"
    printf 'penstock: using the torch in %s\n' "$place" >&2
  fi
}

# constraints_of VENV: the constraints to install with, less torch's own version where one is shared.
constraints_of() {
  if compgen -G "$1/lib/python*/site-packages/shared_torch.pth" >/dev/null; then
    grep -v '^torch==' constraints.txt >"$1/constraints.txt"
    printf '%s\n' "$1/constraints.txt"
  else
    printf 'constraints.txt\n'
  fi
}
