# From nothing to a running job: `make demo`. Each target creates .venv where needed. PYTHON=/path/to/python3.11 chooses the interpreter.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
STAMP := .venv/.installed
PYTEST := $(BIN)/python -m pytest --durations=15
# -e ends a recipe at the first command that fails, but not at one before an &&
timed = @start=$$SECONDS; echo "== $(1)"; $(2); echo "== $(1): $$((SECONDS - start)) s"

.PHONY: help setup demo test lint unit live browser soak chromium lab bench clean

help:
	@echo "make demo     a whole RL job on this machine, ending with one JSON line"
	@echo "make test     lint, unit, live and browser tests"
	@echo "make lab      JupyterLab with the lessons"
	@echo "make bench    the benchmarks; one of them: make bench NAME=learn"
	@echo "make lint     ruff and mypy alone;  make unit, make live, make browser: one part of the tests"
	@echo "make soak     the repeats and rarer cases that make test leaves out"
	@echo "make clean    remove .venv, caches and build outputs (not runs/)"

setup: $(STAMP)

$(STAMP): requirements-cpu.lock pyproject.toml
	@if [ -z "$(PYTHON)" ] || ! $(PYTHON) -c 'import sys; raise SystemExit(sys.version_info < (3, 11))'; then \
		echo "Python 3.11 or newer is needed and '$(PYTHON)' is not that: install it, or say which: make PYTHON=/path/to/python3.11" >&2; exit 1; fi
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || { rm -rf .venv; \
		echo "$(PYTHON) cannot create virtual environments (Debian and Ubuntu: install python3-venv)" >&2; exit 1; }
	@start=$$SECONDS; echo "== installing the locked packages into .venv"; \
	$(BIN)/python -m pip install -qq --no-deps -r requirements-cpu.lock || { \
		echo "Hint: README, 'Installing', says where the CPU build of torch comes from." >&2; exit 1; }; \
	$(BIN)/python -m pip install -qq --no-deps --no-build-isolation -e .; \
	echo "== installed: $$((SECONDS - start)) s"
	@$(BIN)/python -c 'import torch; raise SystemExit(torch.version.cuda is not None and not torch.cuda.is_available())' || { \
		echo "pip brought a CUDA build of torch, and there is no GPU here. README, 'Installing', says where the CPU build comes from." >&2; exit 1; }
	@touch $@

demo: $(STAMP)
	@$(BIN)/robustrl demo

test: $(STAMP)
	@start=$$SECONDS; for part in lint unit live browser; do $(MAKE) --no-print-directory $$part; done; \
	echo "== make test: $$((SECONDS - start)) s"

lint: $(STAMP)
	$(call timed,lint,$(BIN)/ruff check .; $(BIN)/mypy)

# Without pytest's rewriting of asserts, which costs each worker five seconds: what fails is run again with it.
unit: $(STAMP)
	$(call timed,unit tests,$(PYTEST) -n 3 --assert=plain --dist worksteal tests/unit || { $(PYTEST) --last-failed tests/unit; false; })

live: $(STAMP)
	$(call timed,live tests,$(PYTEST) tests/live)

browser: $(STAMP) chromium
	$(call timed,browser tests,if ! ls tests/browser/test_*.py >/dev/null 2>&1; then echo "no browser tests yet"; \
	elif ! command -v chromium >/dev/null; then echo "SKIPPED: no chromium on this machine (Debian: apt-get install chromium)"; \
	else $(PYTEST) tests/browser; fi)

soak: $(STAMP)
	$(call timed,soak,$(PYTEST) -m soak tests/unit tests/live tests/browser)

chromium:
	@if ls tests/browser/test_*.py >/dev/null 2>&1 && ! command -v chromium >/dev/null; then \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then apt-get -qq update && apt-get -qq install -y chromium >/dev/null; \
		else echo "chromium is missing, and installing it needs root and apt-get"; fi; fi

lab: $(STAMP)
	@$(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) notebooks

bench: $(STAMP)
	@for name in $(or $(NAME),$(notdir $(basename $(wildcard tests/benchmarks/[a-z]*.py)))); do $(BIN)/robustrl bench $$name; done

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find robustrl widgets tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
