#!/usr/bin/env bash
# Is everything right on this GPU, and how fast? Arguments go to `pageray bench gpu`.
#   benchmarks/gpu_check.sh                       writes benchmarks/results/gpu-CHIP.md
#   PYTHON=/path/to/python3 benchmarks/gpu_check.sh --model FOLDER
# Exit status: 0 all is well, 1 something failed or is wrong, 3 there is no CUDA GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
VENV_PYTHON=.venv/bin/python

sees_cuda() {
  "$1" -P -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null
}

# What the check imports, tests included; `make install` brings it, and some machines have it.
has_packages() {
  "$1" -P -c 'import msgspec, numba, pydantic, pytest, safetensors, tqdm, transformers, triton, yaml' \
    2>/dev/null
}

# A torch for this machine's GPU is large, and not always the one that pip would choose: the
# virtual environment finds the packages that $PYTHON finds, and only what is missing is installed.
install_beside_torch() {
  "$PYTHON" -m venv .venv
  local own
  own=$("$VENV_PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  "$PYTHON" -P -c 'import sys; print(*(p for p in sys.path if p.endswith("-packages")), sep="\n")' \
    > "$own/packages-of-PYTHON.pth"
  make install PYTHON="$PYTHON"
}

if sees_cuda "$VENV_PYTHON" && has_packages "$VENV_PYTHON"; then
  python=$VENV_PYTHON
elif sees_cuda "$PYTHON" && has_packages "$PYTHON"; then
  python=$PYTHON
elif sees_cuda "$PYTHON"; then
  install_beside_torch
  python=$VENV_PYTHON
elif nvidia-smi -L > /dev/null 2>&1; then
  make install PYTHON="$PYTHON"
  python=$VENV_PYTHON
else
  echo "gpu_check: no CUDA GPU here (neither torch nor nvidia-smi sees one); nothing was run." >&2
  exit 3
fi
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -P -m pageray.router.cli bench gpu "$@"
