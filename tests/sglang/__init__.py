"""Tests with real SGLang, in an environment of its own (`make test-extras`)."""
