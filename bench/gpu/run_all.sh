#!/usr/bin/env bash
# Every measurement and every GPU test, on a host with 1, 2, 4 or 8 GPUs; see bench/gpu/run_all.py. `make gpu` does the same.
#   bench/gpu/run_all.sh [--parts environment,tests,refit,...] [--out DIR] [--limit SECONDS] [--list]
# It runs in the environment that is active, if that has Ray and torch; else in .venv, which may have a torch without CUDA.
cd "$(dirname "$0")/../.." || exit 1
python=python3
"$python" -c 'import sys; from importlib.util import find_spec as has; sys.exit(not (has("ray") and has("torch")))' ||
    python=.venv/bin/python
PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -m bench.gpu.run_all "$@"
