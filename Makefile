# What a newcomer types: `make demo`, `make test`. Set-up runs once and again when its inputs change.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SYSTEM := $(VENV)/.system

.PHONY: help setup demo test check lint types unit integration rehearsal e2e long slow soak bench bench-peers bench-gpu clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 14

setup: $(READY) $(SYSTEM)  ## a virtual environment with everything, and the tests' system programs

$(READY): pyproject.toml constraints.txt scripts/setup.sh
	@PYTHON=$(PYTHON) VENV=$(VENV) bash scripts/setup.sh
	@touch $@

$(SYSTEM): scripts/system.sh | $(READY)
	@bash scripts/system.sh
	@touch $@

demo: $(READY)  ## train on real images here and end with a validated model
	@$(BIN)/python launcher/submit.py source_dir/configs/digits.yaml

check: setup lint types unit  ## what should be clean before every commit, under a minute

test: setup  ## everything but `make soak`; a part that fails does not keep the next from running
	@bash scripts/test.sh lint types unit long slow

soak: setup  ## what takes minutes, before a release; writes docs/soak.md
	@bash scripts/soak.sh

lint: $(READY)  ## ruff, style and format rules
	@$(BIN)/ruff check .

types: $(READY)  ## mypy --strict
	@$(BIN)/mypy

unit: setup
	@$(BIN)/python -m pytest -q -n 2 -m "not long" tests/unit

long: setup
	@$(BIN)/python -m pytest -q -n 2 --dist loadfile -m long tests/unit

# Three files at a time, also on two cores: much of it is waiting for processes.
SLOW := $(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder --durations=10 --durations-min=1

integration rehearsal e2e: setup
	@$(SLOW) tests/$@

slow: setup
	@$(SLOW) tests/integration tests/rehearsal tests/e2e

bench: setup  ## benchmarks against peers, as tables and benchmarks/results/latest.json
	@$(BIN)/python -m benchmarks

bench-peers: setup  ## install the loaders that the benchmarks compare with (1 GB); without them they are skipped
	@bash scripts/bench_peers.sh

bench-gpu: setup  ## training on a real GPU against data that costs nothing; says so where there is none
	@$(BIN)/python -m benchmarks.gpu

clean:  ## remove the environment, caches and example data, never runs/
	rm -rf $(VENV) .peers .data .pytest_cache .mypy_cache .ruff_cache
