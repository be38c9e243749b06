"""Benchmarks on hosts with GPUs; `run_all.sh` runs them all."""
