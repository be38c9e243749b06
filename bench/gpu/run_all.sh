#!/usr/bin/env bash
# Every measurement and every GPU test, on a host with 1, 2, 4 or 8 GPUs; see bench/gpu/run_all.py. `make gpu` does the same.
#   bench/gpu/run_all.sh [--parts environment,tests,refit,...] [--out DIR] [--list]
cd "$(dirname "$0")/../.." || exit 1
python=.venv/bin/python
[ -x "$python" ] || python=python3
PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -m bench.gpu.run_all "$@"
