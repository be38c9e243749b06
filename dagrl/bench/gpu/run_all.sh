#!/usr/bin/env bash
# Runs every benchmark and GPU test on a host with 1, 2, 4 or 8 GPUs; see bench/gpu/run_all.py. Same as `make gpu`.
#   bench/gpu/run_all.sh [--parts environment,tests,refit,...] [--out DIR] [--limit SECONDS] [--list]
# Uses the active environment if it has Ray and torch, otherwise .venv, whose torch may lack CUDA.
cd "$(dirname "$(realpath "$0")")/../../.." || exit 1
python=python3
"$python" -c 'import sys; from importlib.util import find_spec as has; sys.exit(not (has("ray") and has("torch")))' ||
    python=.venv/bin/python
PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -m dagrl.bench.gpu.run_all "$@"
