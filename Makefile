# Start with `make demo` or `make test`. Setup runs once, and again when its inputs change.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SYSTEM := $(VENV)/.system

# Containers often set it; the tests would then compile all their files again in each of their processes.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test test-all check lint types unit integration rehearsal e2e slow old test-versions test-programs soak storm
.PHONY: docs bench bench-peers bench-gpu coverage build sbom audit clean

help:  ## list these targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 14

setup: $(READY) $(SYSTEM)  ## create the virtual environment and install the system packages of the tests

$(READY): pyproject.toml constraints.txt scripts/setup.sh
	@PYTHON=$(PYTHON) VENV=$(VENV) bash scripts/setup.sh
	@touch $@

$(SYSTEM): scripts/system.sh | $(READY)
	@bash scripts/system.sh
	@touch $@

demo: $(READY)  ## train a model on real images on this machine
	@$(BIN)/python launcher/submit.py source_dir/configs/digits.yaml

check: setup lint types unit  ## lint, types and unit tests before every commit, under a minute

test: setup  ## lint, types and all tests except the long ones; continues after a failed part
	@bash scripts/test.sh lint types unit slow old

test-all: setup  ## the same with the long tests, as in the nightly workflow
	@LONG=1 bash scripts/test.sh lint types unit slow old

soak: setup  ## slow tests and a storm before a release; MINUTES=60 SEED=7; writes docs/soak.md
	@bash scripts/soak.sh

storm: setup  ## only the storm of `make soak`: a job under seeded faults; MINUTES=10 SEED=7
	@$(BIN)/python -m benchmarks.storm --minutes $(or $(MINUTES),10) $(if $(SEED),--seed $(SEED))

lint: $(READY)  ## ruff
	@$(BIN)/ruff check . && $(BIN)/ruff format --check --quiet .

types: $(READY)  ## mypy --strict
	@$(BIN)/mypy

CHOSEN := $(if $(LONG),,-m "not long")

unit: setup
	@$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder $(CHOSEN) tests/unit

old: setup  ## a small job and a lost host on the oldest Ray
	@bash scripts/versions.sh old

test-versions: setup  ## a selection on the oldest, a middle and the newest Ray, Python 3.11 to 3.13, PyTorch from 2.6
	@bash scripts/versions.sh oldest middle newest

test-programs: setup  ## train other projects' programs, such as nnU-Net, with Stoker
	@bash scripts/programs.sh

SLOW := $(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder --durations=10 --durations-min=1

integration rehearsal e2e: setup
	@$(SLOW) tests/$@

slow: setup
	@$(SLOW) $(CHOSEN) tests/e2e tests/rehearsal tests/integration

bench: setup  ## benchmarks against peers; writes benchmarks/results/latest.json
	@$(BIN)/python -m benchmarks

bench-peers: setup  ## install the peer loaders (1 GB); benchmarks skip missing ones
	@bash scripts/bench_peers.sh

bench-gpu: setup  ## input-bound against synthetic training; needs a GPU
	@$(BIN)/python -m benchmarks.gpu

docs: setup  ## the documentation as a site, in build/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

coverage: setup  ## lines that the unit tests run, subprocesses included; PARTS="unit integration" for more
	@$(BIN)/coverage erase
	@$(BIN)/coverage run -m pytest -q -n 2 --dist loadfile $(CHOSEN) $(addprefix tests/,$(or $(PARTS),unit)); \
	  code=$$?; $(BIN)/coverage combine -q && $(BIN)/coverage report --skip-covered; exit $$code

BUILD ?= $(BIN)/python -m hatchling
build: $(if $(filter $(BIN)/%,$(BUILD)),$(READY))  ## the wheel and the source distribution, in dist/
	@rm -rf dist && $(BUILD) build

sbom: setup  ## the packages of a release and their licenses, CycloneDX, in build/
	@$(BIN)/python scripts/sbom.py

audit: setup  ## known vulnerabilities of the pinned packages; needs PyPI
	@$(BIN)/python scripts/audit.py

clean:  ## remove the environment, caches and example data; keeps runs/
	rm -rf dist .coverage $(VENV) .versions .peers .audit .places .data .pytest_cache .mypy_cache .ruff_cache
