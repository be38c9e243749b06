"""Agents: functions that talk to the policy through an OpenAI-compatible endpoint; training is on their conversations."""

from dagrl.rl.functions.agents import Endpoint as Endpoint
