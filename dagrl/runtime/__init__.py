"""Phases, graphs and layouts, and what compiles, schedules and replays them over groups of Ray actors."""
