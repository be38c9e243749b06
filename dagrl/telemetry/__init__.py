"""Telemetry: metrics, timing, traces, progress and the run directory."""
