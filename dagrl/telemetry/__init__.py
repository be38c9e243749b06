"""Telemetry: what a run measures, writes down and shows."""
