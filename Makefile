# make setup | quickstart | test | lint | gpu. Everything lives in .venv; an environment that is up to date is not touched.
PYTHON ?= python3.11
VENV := .venv
PIP := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps
TORCH := $(shell grep '^torch==' requirements/cpu.lock)
# Stamps carry the content of what was installed, so that a fresh clone's file times do not matter.
content = $(shell cat $(1) | sha256sum | cut -c1-16)
SETUP := $(VENV)/.setup-$(call content,requirements/cpu.lock pyproject.toml)
TOOLS := $(VENV)/.tools-$(call content,requirements/cpu.lock requirements/test.lock pyproject.toml)

.PHONY: setup quickstart test lint gpu

setup: $(SETUP)

quickstart: $(SETUP)
	$(VENV)/bin/dagrl train examples/grpo_quickstart.yaml

# Two processes: one for the tests that start Ray or engines (tests/conftest.py), one for the rest.
test: $(TOOLS)
	$(VENV)/bin/python -m pytest --numprocesses=2 --dist=loadscope

lint: $(TOOLS)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# On a host with GPUs, in an environment with dagrl[megatron,vllm,cu13,tracking,bench,dev]; PARTS=refit,step runs these alone, LIMIT=200 each for so many seconds.
gpu:
	bench/gpu/run_all.sh $(if $(PARTS),--parts $(PARTS)) $(if $(LIMIT),--limit $(LIMIT))

$(SETUP):
	@echo "Installing requirements/cpu.lock into $(VENV), which takes a few minutes"
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH) 2>/dev/null || $(PIP) --index-url https://download.pytorch.org/whl/cpu $(TORCH)
	$(PIP) --requirement requirements/cpu.lock
	$(PIP) --no-build-isolation --editable .
	@rm -f $(VENV)/.setup-*
	@touch $@

$(TOOLS): $(SETUP)
	$(PIP) --requirement requirements/test.lock
	@rm -f $(VENV)/.tools-*
	@touch $@
