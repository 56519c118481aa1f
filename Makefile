# Weft's commands. `make help` lists them. Everything goes into .venv/ and build/, which `make clean` removes
# (.venv stays). `make VENV= test` uses the current interpreter instead of a virtual environment.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
JOBS ?= $(shell nproc)

ifeq ($(strip $(VENV)),)
bin :=
python := $(PYTHON)
environment := build/environment.stamp
else
bin := $(VENV)/bin/
python := $(VENV)/bin/python
environment := $(VENV)/environment.stamp
endif

pip := $(python) -m pip
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
ifneq ($(strip $(VENV)),)
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
endif

.PHONY: help
help: ## list the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | sort | while IFS=$$'\t' read -r name text; do \
	  printf '  make %-8s %s\n' "$$name" "$$text"; done

.PHONY: dev
dev: $(environment) ## fast rebuild of the native module next to the sources; use with PYTHONPATH=python
	@mkdir -p build/dev
	@flock build/dev.lock bash -euo pipefail -c '\
	  [ -f build/dev/build.ninja ] || cmake -S . -B build/dev -G Ninja -DPython_EXECUTABLE="$$(command -v $(python))" \
	      -DWEFT_MODULE_DIR="$(CURDIR)/python/weft" >/dev/null; \
	  cmake --build build/dev -j $(JOBS)'

$(environment): pyproject.toml constraints.txt
	@if [ -n "$(strip $(VENV))" ] && [ ! -x "$(python)" ]; then $(PYTHON) -m venv $(VENV); fi
	$(pip) install --quiet $$($(PYTHON) tools/requirements.py)
	@mkdir -p $(@D) && touch $@
