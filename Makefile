# Two commands: `make serve` answers a curl, `make test` runs what CI runs. Both set up everything they need in .venv,
# from a package index alone. `make help` lists the rest.

VENV ?= .venv
HOST ?= 127.0.0.1
PORT ?= 30000
WORKERS ?= 2                 # parallel test processes
ARGS ?=                      # further flags: make serve ARGS="--page-size 16", make test ARGS="-k radix"
TORCH_INDEX ?=               # an index with another build of PyTorch, such as the CPU build
# The first Python that is new enough.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

BIN := $(strip $(VENV))/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt \
	$(if $(strip $(TORCH_INDEX)),--extra-index-url $(strip $(TORCH_INDEX)))
ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

.PHONY: serve test check lint docs soak atlas clean help

serve: $(BIN)/.installed  ## serve the demo model on 127.0.0.1:30000
	@$(BIN)/tinysrt demo-model >/dev/null
	$(BIN)/tinysrt serve --host $(strip $(HOST)) --port $(strip $(PORT)) $(ARGS)

test: $(BIN)/.installed-dev  ## every test that CI runs
	@$(BIN)/tinysrt demo-model >/dev/null
	$(ENV) $(BIN)/python -m pytest -n $(strip $(WORKERS)) --durations=20 --session-timeout=2400 $(ARGS)

check: $(BIN)/.installed-dev lint  ## the five-minute subset for daily work
	$(ENV) $(BIN)/python -m pytest -n $(strip $(WORKERS)) -m "not slow and not e2e and not browser" $(ARGS)

lint: $(BIN)/.installed-dev  ## format, style, types, import rows
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(BIN)/.installed-dev  ## build the site into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

atlas: $(BIN)/.installed-dev  ## write docs/atlas.md anew, after a change of flags
	$(BIN)/python tools/atlas.py

soak: $(BIN)/.installed-dev  ## the exhaustive matrices: hours; never in CI
	@$(BIN)/tinysrt demo-model >/dev/null
	TINYSRT_SOAK=1 $(ENV) $(BIN)/python -m pytest -n $(strip $(WORKERS)) --durations=20 --timeout=7200 $(ARGS)

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "tinysrt needs Python 3.11 or newer; name one with PYTHON=..."; exit 1; }
	@$(PYTHON) -m venv $(strip $(VENV)) || { rm -rf $(strip $(VENV)); \
		echo "Python cannot make a virtual environment: install its venv package (Debian: python3-venv)"; exit 1; }

$(BIN)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@$(if $(strip $(TORCH_INDEX)),,$(BIN)/python tools/torch_notice.py $(or $(firstword $(MAKECMDGOALS)),serve) "$$(grep ^torch== constraints.txt)")
	$(PIP) -e .
	@touch $@

$(BIN)/.installed-dev: $(BIN)/.installed
	$(PIP) -e ".[dev,docs]"
	@touch $@

clean:  ## remove what was built, but not .venv
	rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find tinysrt tests -name __pycache__ -type d -prune -exec rm -rf {} +

help:
	@grep -hE '^[a-z]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 10
