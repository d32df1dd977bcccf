# Everything needs only Python 3.11 or later with venv. PYTHON names another interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# PyTorch's index: auto (the CPU build where there is no NVIDIA GPU), none (PyPI's build), or a URL.
TORCH_INDEX ?= auto
INSTALL := $(PYTHON) scripts/install.py --torch-index $(TORCH_INDEX) $(VENV)
ARGS ?=
# Every process of a test compiles the sources again otherwise.
export PYTHONDONTWRITEBYTECODE :=
# Files of tests that run side by side: on two processors three, as tests wait a third of their time. With more,
# tests of time limits fail.
TEST_PROCESSES ?= 3
# Processes of tests on one GPU: they wait for the compilation of kernels more than for the GPU, whose memory each
# takes 1 GB of.
GPU_PROCESSES ?= 8

RAY_VENV := .venv-ray
# vLLM pins other versions of what the engines share.
VLLM_VENV := .venv-vllm
AIPERF_VENV := .venv-aiperf
TEMPLATES_VENV := .venv-templates
# Clients exclude each other's versions: those of the openai package 3, and those of 2.
CLIENTS_VENV := .venv-clients
OPENAI2_VENV := .venv-clients-openai2
# Gateways of others, to measure beside.
GATEWAYS_VENV := .venv-gateways
# The reference validator of JSON Schema and collections of schemas, beside the environment of development.
SCHEMAS := .venv-schemas
NODE := tests/clients/node
AGENTS := tests/agents
PAGE := tests/page/node
# The files of an NVIDIA GPU's driver.
GPU := $(wildcard /dev/nvidiactl /proc/driver/nvidia /dev/dxg)
# Every target with tests of its own, for test-all: test-gpu where there is an NVIDIA GPU.
ALL_TESTS := $(filter-out test-slow test-all $(if $(GPU),,test-gpu),$(filter test test-%,$(shell grep '^.PHONY:' Makefile)))

# vLLM's tests of its parsers, of which nothing is installed.
VLLM_CASES := .venv-vllm-cases
# What clients leave open, and warn of, is theirs.
CLIENT_TESTS := -m pytest -W ignore -p no:unraisableexception tests/clients

.PHONY: install install-dev no-gpu serve test test-slow test-gpu test-all test-pythons test-ray test-vllm test-parsers test-templates test-clients test-agents test-page test-schemas check format bench bench-against bench-agentx bench-gateways clean

install: $(VENV)/.installed  ## What serving needs.
install-dev: $(VENV)/.installed-dev  ## What tests, linters and every optional part need.

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(INSTALL) torch
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt
	@$(INSTALL) torch,envoy,kubernetes,redis,jwt,otel,dev
	@touch $@ $(VENV)/.installed

serve: install  ## Serve the bundled demo model; ARGS="MODEL --port 9000" serves another.
	$(BIN)/penstock serve $(ARGS)

test: install-dev  ## All tests but the slow ones.
	$(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder $(ARGS)

test-slow: install-dev
	$(BIN)/python -m pytest --slow $(ARGS)

test-gpu: $(if $(GPU),,no-gpu) install-dev  ## What a GPU may do otherwise: kernels, CUDA graphs, the engine, equality with transformers.
	$(BIN)/python -m pytest --device cuda -m gpu --numprocesses $(GPU_PROCESSES) --dist worksteal $(ARGS) tests/engine/torch

no-gpu:
	@echo 'test-gpu: no driver of an NVIDIA GPU here. In a container, start it with the GPU (docker run --gpus all);' >&2
	@echo 'without a GPU, make test runs the same tests on the CPU.' >&2
	@exit 1

# Goes on after a failure, and prints a table.
test-all:
	$(PYTHON) scripts/test_all.py $(ALL_TESTS)

test-pythons: install-dev  ## The wheel in a clean environment of every supported Python that is found.
	$(BIN)/python -m pytest --slow tests/packaging/test_interpreters.py $(ARGS)

$(RAY_VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) scripts/install.py $(RAY_VENV) ray,dev
	@touch $@

test-ray: $(RAY_VENV)/.installed  ## Engines on a real Ray cluster, in an environment of their own.
	$(RAY_VENV)/bin/python -m pytest tests/placement tests/integration/test_ray.py $(ARGS)

test-vllm: $(VLLM_VENV)/.installed  ## The tests of --engine vllm and --attach, on the CPU.
	$(VLLM_VENV)/bin/python -m pytest --slow -k "not torch" $(ARGS) \
		tests/engine/attach tests/dialects/test_fields.py tests/integration/test_vllm.py \
		tests/integration/test_vllm_lora.py tests/integration/test_vllm_transfer.py tests/integration/test_golden.py \
		tests/integration/test_attach_vllm.py tests/integration/test_vllm_weight_transfer.py \
		tests/integration/test_vllm_images.py

$(VLLM_VENV)/.installed: requirements-vllm.txt pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $$(grep ^torch== requirements-vllm.txt)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-vllm.txt -e .
	touch $@

# Conversations under the chat templates of real models, by this server and by transformers.
test-templates: $(TEMPLATES_VENV)/.installed
	$(TEMPLATES_VENV)/bin/python -m pytest tests/templates $(ARGS)

$(TEMPLATES_VENV)/.installed: requirements-templates.txt pyproject.toml constraints.txt
	$(PYTHON) -m venv $(TEMPLATES_VENV)
	$(TEMPLATES_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e . \
		transformers hypothesis pytest pytest-timeout trustme
	rm -rf $(TEMPLATES_VENV)/packages
	$(TEMPLATES_VENV)/bin/python -m pip download --quiet --disable-pip-version-check --no-deps \
		--no-binary llama_cpp_python --dest $(TEMPLATES_VENV)/packages -r requirements-templates.txt
	touch $@

# vLLM's own cases of tool calls and reasoning, read by Penstock's parsers.
test-parsers: install-dev $(VLLM_CASES)/.unpacked
	cd $(VLLM_CASES) && PYTHONPATH=.:$(CURDIR)/tests/vllm_cases $(CURDIR)/$(BIN)/python -m pytest -W ignore \
		-c $(CURDIR)/tests/vllm_cases/pytest.ini --rootdir . -p adapters tests/tool_parsers tests/reasoning $(ARGS)

$(VLLM_CASES)/.unpacked: tests/vllm_cases/unpack.py
	$(BIN)/python $< $(VLLM_CASES)
	touch $@

# LLM frameworks and SDKs against the demo model, directly and through a gateway; with node also those of npm.
test-clients: install $(CLIENTS_VENV)/.installed $(OPENAI2_VENV)/.installed $(NODE)/node_modules
	$(CLIENTS_VENV)/bin/python $(CLIENT_TESTS) $(ARGS)
	$(OPENAI2_VENV)/bin/python $(CLIENT_TESTS) --deselect tests/clients/test_node.py $(ARGS)

$(CLIENTS_VENV)/.installed: requirements-clients.txt
$(OPENAI2_VENV)/.installed: requirements-clients-openai2.txt
$(CLIENTS_VENV)/.installed $(OPENAI2_VENV)/.installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	touch $@

$(NODE)/node_modules: $(NODE)/package-lock.json
	if command -v npm >/dev/null; then npm ci --prefix $(NODE) --silent && touch $@; fi

# Unmodified coding agents, as npm has them, against a model that follows a script.
test-agents: install-dev $(AGENTS)/node_modules
	$(BIN)/python -m pytest --slow $(AGENTS) $(ARGS)

$(AGENTS)/node_modules: $(AGENTS)/package-lock.json
	npm install --prefix $(AGENTS) --no-save --silent
	touch $@

# The web page by CommonMark's cases and axe's rules, as npm has them.
test-page: install-dev $(PAGE)/node_modules
	$(BIN)/python -m pytest tests/page $(ARGS)

$(PAGE)/node_modules: $(PAGE)/package-lock.json
	npm ci --prefix $(PAGE) --silent && touch $@

test-schemas: install-dev $(SCHEMAS)/.installed  ## Grammars of other people's schemas against a reference validator.
	PYTHONPATH=$(SCHEMAS) $(BIN)/python -m pytest tests/schemas $(ARGS)

# The sources of jsonschema carry the JSON Schema Test Suite.
$(SCHEMAS)/.installed: requirements-schemas.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(SCHEMAS) -r $<
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --no-binary jsonschema \
		--dest $(SCHEMAS)/sources $$(grep ^jsonschema== $<)
	tar -xzf $(SCHEMAS)/sources/jsonschema-*.tar.gz -C $(SCHEMAS)/sources --strip-components=1
	touch $@

check: install-dev  ## Format, lint, types; import order and generated docs are among the tests.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: install-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install  ## Host cost per token of an API server; see docs/benchmarks.md.
	$(BIN)/penstock bench host $(ARGS)

# A change is compared with the commit before, and a release with the pinned one of docs/log.md.
bench-against: install  ## REF=COMMIT: CPU time of requests beside that commit's, by turns; ONLY=short,text TURNS=9 QUICK=1.
	$(BIN)/python -m scripts.bench_against $(REF) $(if $(ONLY),--only $(ONLY)) $(if $(TURNS),--turns $(TURNS)) $(if $(QUICK),--quick)

# Beside the gateways of others, from PyPI in an environment of their own; ONLY=request,burst-128 TURNS=9 QUICK=1.
bench-gateways: install $(GATEWAYS_VENV)/.installed
	$(BIN)/python -m scripts.bench_gateways --peers $(GATEWAYS_VENV) $(if $(ONLY),--only $(ONLY)) $(if $(TURNS),--turns $(TURNS)) $(if $(QUICK),--quick)

# Beside vLLM's Python server if its environment is there: make test-vllm installs it.
bench-agentx: install $(AIPERF_VENV)/.installed  ## Front ends under aiperf's conversations of agents.
	$(BIN)/python -m scripts.bench_agentx --aiperf $(AIPERF_VENV)/bin/python $(if $(wildcard $(VLLM_VENV)/.installed),--vllm $(VLLM_VENV)/bin/python) $(ARGS)

$(AIPERF_VENV)/.installed:
	$(PYTHON) -m venv $(AIPERF_VENV)
	$(AIPERF_VENV)/bin/python -m pip install --quiet --disable-pip-version-check aiperf==0.13.0
	touch $@

$(GATEWAYS_VENV)/.installed: requirements-gateways.txt
	$(PYTHON) -m venv $(GATEWAYS_VENV)
	$(GATEWAYS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

clean:
	rm -rf $(VENV) $(RAY_VENV) $(VLLM_VENV) $(VLLM_CASES) $(TEMPLATES_VENV) $(CLIENTS_VENV) $(OPENAI2_VENV) $(SCHEMAS) $(NODE)/node_modules $(AGENTS)/node_modules $(PAGE)/node_modules build dist *.egg-info .mypy_cache .ruff_cache
