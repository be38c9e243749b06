# make setup | quickstart | test | test-versions | peers | test-peers | test-agents | test-sglang | test-trackers | test-kernels | chaos | lint | types | docs | audit | gpu. Installs into .venv, once per change of the lock files.
PYTHON ?= python3.11
VENV := .venv
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --no-deps
PIP := $(VENV)/bin/python $(PIP_INSTALL) --no-compile
# With as many processes as there are cores; pip has one. Packages also contain files for other versions of Python, which fail.
COMPILE := $(VENV)/bin/python -m compileall -qq -j 0 $(VENV)/lib || true
TORCH := $(shell grep '^torch==' requirements/cpu.lock)
# A stamp is named after a hash of what was installed, because the file times of a fresh clone say nothing.
content = $(shell cat $(1) | sha256sum | cut -c1-16)
SETUP := $(VENV)/.setup-$(call content,requirements/cpu.lock pyproject.toml)
PEERS := .venv-peers
PEERS_TORCH := $(shell grep '^torch==' requirements/peers.lock)
# In a folder of its own, on the path of its tests only: verl's workers import classes that this TRL no longer has.
TRL := trl==1.16.0
PEERS_SETUP := $(PEERS)/.setup-$(call content,requirements/peers.lock pyproject.toml)
AGENTS := .venv-agents
AGENTS_SETUP := $(AGENTS)/.setup-$(call content,requirements/agents.lock pyproject.toml)
VERIFIERS := .venv-verifiers
VERIFIERS_SETUP := $(VERIFIERS)/.setup-$(call content,requirements/verifiers.lock pyproject.toml)
SGLANG := .venv-sglang
SGLANG_SETUP := $(SGLANG)/.setup-$(call content,requirements/sglang.lock pyproject.toml)
TRACKERS := .venv-trackers
TRACKERS_SETUP := $(TRACKERS)/.setup-$(call content,requirements/trackers.lock pyproject.toml)
KERNELS := .venv-kernels
KERNELS_SETUP := $(KERNELS)/.setup-$(call content,requirements/kernels.lock pyproject.toml)
TOOLS := $(VENV)/.tools-$(call content,requirements/*.lock pyproject.toml)

.PHONY: setup quickstart test test-versions peers test-peers test-agents test-sglang test-trackers test-kernels chaos lint types docs audit gpu

setup: $(SETUP)

quickstart: $(SETUP)
	$(VENV)/bin/dagrl train examples/grpo_quickstart.yaml

# Two processes take the files in order, except for those that share pools of workers (tests/conftest.py). Hundreds of processes
# import our modules, which are compiled first because Python may be told not to write bytecode.
test: $(TOOLS)
	$(VENV)/bin/python -m compileall -q -j 0 dagrl
	$(VENV)/bin/python -m pytest --numprocesses=2 --dist=loadscope --no-loadscope-reorder --durations=40

# The runtime's tests on other versions, an hour for these: make test-versions VERSIONS="ray==2.59.0 python3.13,torch==2.14.1"
VERSIONS ?= ray==2.54.0 python3.12 python3.13 python3.13,ray==2.54.0
test-versions: $(TOOLS)
	$(VENV)/bin/python tests/versions.py $(VERSIONS)

# Tests with real verl and TRL, which need other versions than we test with: in an environment of its own, which `peers` makes.
peers: $(PEERS_SETUP)

test-peers: $(PEERS_SETUP)
	$(PEERS)/bin/python -m pytest tests/peers --override-ini=testpaths=tests/peers
	PYTHONPATH=$(PEERS)/trl $(PEERS)/bin/python -m pytest tests/peers/test_trl_*.py

# Tests with real verifiers (before 0.4, and 0.4) and OpenEnv, in two environments over .venv. 0.4's programs need a network.
test-agents: $(AGENTS_SETUP) $(VERIFIERS_SETUP)
	$(AGENTS)/bin/python -m pytest tests/agents --override-ini=testpaths=tests/agents
	$(VERIFIERS)/bin/python -m pytest tests/agents/test_verifiers_programs.py

# Faults against real runs for an hour, or for LIMIT seconds: make chaos LIMIT=600 SEED=3. As root it can try more of them.
chaos: $(TOOLS)
	$(VENV)/bin/python -m tests.chaos.campaign --limit $(or $(LIMIT),3600) --seed $(or $(SEED),0) --json build/chaos.json

# Refits into the models of real SGLang, in an environment over .venv.
test-sglang: $(SGLANG_SETUP)
	$(SGLANG)/bin/python -m pytest tests/sglang --override-ini=testpaths=tests/sglang

# Tests with real Weights & Biases, MLflow and trackio, offline, in an environment over .venv.
test-trackers: $(TRACKERS_SETUP)
	$(TRACKERS)/bin/python -m pytest tests/unit/telemetry/test_trackers.py

# Triton kernels without a GPU, by Triton's interpreter, in an environment over .venv.
test-kernels: $(KERNELS_SETUP)
	TRITON_INTERPRET=1 $(KERNELS)/bin/python -m pytest tests/gpu/test_*_kernels.py

lint: docs types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports
	$(VENV)/bin/python requirements/audit.py

types: $(TOOLS)
	$(VENV)/bin/mypy

# Builds the documentation into site/. Strict: a broken link or anchor is an error.
docs: $(TOOLS)
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --quiet --clean

# Asks PyPI's advisory database about every locked version, which needs a network; `lint` has the part that does not.
audit:
	$(PYTHON) -m venv .venv-audit
	.venv-audit/bin/python -m pip install --quiet --disable-pip-version-check pip-audit packaging
	.venv-audit/bin/python requirements/audit.py --online

# On a host with GPUs, in an environment with dagrl[megatron,vllm,cu13,tracking,bench,dev]; PARTS=refit,step runs these alone, LIMIT=200 each for so many seconds.
gpu:
	bench/gpu/run_all.sh $(if $(PARTS),--parts $(PARTS)) $(if $(LIMIT),--limit $(LIMIT))

$(SETUP):
	@echo "Installing requirements/cpu.lock into $(VENV), which takes a few minutes"
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH) 2>/dev/null || $(PIP) --index-url https://download.pytorch.org/whl/cpu $(TORCH)
	$(PIP) --requirement requirements/cpu.lock
	$(PIP) --no-build-isolation --editable .
	$(COMPILE)
	@rm -f $(VENV)/.setup-*
	@touch $@

$(TOOLS): $(SETUP)
	$(PIP) --requirement requirements/test.lock --requirement requirements/docs.lock
	$(COMPILE)
	@rm -f $(VENV)/.tools-*
	@touch $@

$(PEERS_SETUP):
	@echo "Installing requirements/peers.lock into $(PEERS), which takes a few minutes"
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python $(PIP_INSTALL) $(PEERS_TORCH) 2>/dev/null || \
		$(PEERS)/bin/python $(PIP_INSTALL) --index-url https://download.pytorch.org/whl/cpu $(PEERS_TORCH)
	$(PEERS)/bin/python $(PIP_INSTALL) --requirement requirements/peers.lock
	$(PEERS)/bin/python $(PIP_INSTALL) --target $(PEERS)/trl $(TRL)
	$(PEERS)/bin/python $(PIP_INSTALL) --no-build-isolation --editable .
	@rm -f $(PEERS)/.setup-*
	@touch $@

# $(call over_venv,environment,lock file): an environment that also sees .venv.
define over_venv
@echo "Installing $(2) into $(1), which takes a few minutes"
$(PYTHON) -m venv $(1)
$(1)/bin/python $(PIP_INSTALL) --requirement $(2)
$(VENV)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > $(1)/lib/python3.11/site-packages/zz_dagrl.pth
@rm -f $(1)/.setup-*
@touch $@
endef

$(AGENTS_SETUP): $(TOOLS)
	$(call over_venv,$(AGENTS),requirements/agents.lock)

$(VERIFIERS_SETUP): $(TOOLS)
	$(call over_venv,$(VERIFIERS),requirements/verifiers.lock)

$(SGLANG_SETUP): $(TOOLS)
	$(call over_venv,$(SGLANG),requirements/sglang.lock)

$(TRACKERS_SETUP): $(TOOLS)
	$(call over_venv,$(TRACKERS),requirements/trackers.lock)

$(KERNELS_SETUP): $(TOOLS)
	$(call over_venv,$(KERNELS),requirements/kernels.lock)
