# Weft's commands; `make help` lists them. Everything is made in .venv/ and build/.
# `make VENV= test` uses the interpreter named by PYTHON (python3) as it is, and installs only what it lacks.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV ?= .venv
JOBS ?= $(shell nproc)
# Whether native tests are also built with AddressSanitizer, UBSan and ThreadSanitizer; .ci/long does that.
SANITIZERS ?= OFF

ifeq ($(strip $(VENV)),)
python := $(PYTHON)
runtime := build/runtime.stamp
environment := build/environment.stamp
installed := build/installed.stamp
else
python := $(abspath $(VENV))/bin/python
runtime := $(VENV)/runtime.stamp
environment := $(VENV)/environment.stamp
installed := $(VENV)/installed.stamp
endif
scripts = $(shell $(python) -c 'import sysconfig; print(sysconfig.get_path("scripts"))')

# Pins hold for every pip below, those that it starts to build something included.
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
install := $(python) -m pip install --quiet --no-compile
only_missing := $(if $(strip $(VENV)),,--missing)
# Where torch comes from, if not from pip's own index. Machines without a GPU take the build for CPUs; TORCH_INDEX= does not.
TORCH_INDEX ?= $(if $(wildcard /dev/nvidiactl /dev/dxg),,https://download.pytorch.org/whl/cpu)

.PHONY: help
help: ## list the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | while IFS=$$'\t' read -r name text; do
	  printf '  make %-12s %s\n' "$$name" "$$text"; done

.PHONY: demo
demo: $(installed) ## train a small MoE language model over four ranks (DEMO="--kill-rank 2" for options)
	@echo "[3/3] weft demo"
	$(python) -m weft.cli demo $(DEMO)

.PHONY: prepare
prepare: $(environment) $(installed) ## make .venv, build and install the package

.PHONY: test
test: $(if $(filter no,$(NATIVE)),,native-test) $(environment) $(installed) ## run every test (TESTS="tests/python -k capacity" for some, NATIVE=no without C++)
	$(python) -m pytest $(if $(TESTS),$(TESTS),-n $$(($(JOBS) + 1)) --maxprocesses 8 --dist loadscope)

.PHONY: test-quick
test-quick: $(environment) $(installed) ## run the quick tests of the package: no C++, no compiled kernels, no slow ones
	$(python) -m pytest tests/python tests/tools -m "not slow and not long" -n $(JOBS) --maxprocesses 8 --dist loadscope -q

.PHONY: native-test
native-test: $(environment) ## build and run the C++ tests alone (SANITIZERS=ON for those with sanitizers too)
	@export PATH="$(scripts):$$PATH"
	mkdir -p build/native
	exec 9>build/native.lock; flock 9
	cmake -S . -B build/native -G Ninja -DWEFT_BUILD_TESTS=ON -DWEFT_BUILD_MODULE=OFF -DWEFT_TEST_SANITIZERS=$(SANITIZERS) >/dev/null
	cmake --build build/native -j $(JOBS)
	ctest -j $(JOBS) --test-dir build/native --output-on-failure --no-tests=error --timeout 900

.PHONY: lint
lint: $(environment) ## run all linters and format checks
	@PATH="$(scripts):$$PATH" pre-commit run --all-files --show-diff-on-failure

.PHONY: format
format: $(environment) ## format the sources in place (FILES="a.cc b.py" for some)
	@export PATH="$(scripts):$$PATH"
	files=($(if $(FILES),$(FILES),$$(git ls-files '*.py' '*.pyi' '*.h' '*.cuh' '*.cc' '*.cu')))
	for file in "$${files[@]}"; do
	  case $$file in *.py|*.pyi) ruff check --quiet --fix "$$file" || true; ruff format --quiet "$$file";; *.h|*.cuh|*.cc|*.cu) clang-format -i "$$file";; esac
	done

.PHONY: wheel
wheel: $(environment) ## build the wheels of weft and weft-deep-ep into dist/ and look them over
	@rm -rf dist
	CI=1 PATH="$(scripts):$$PATH" $(python) -m pip wheel --quiet --no-build-isolation --no-deps -w dist . ./packaging/weft-deep-ep
	$(python) tools/check_wheel.py dist/*.whl

.PHONY: dev
dev: $(environment) ## rebuild the native module next to the sources, for use with PYTHONPATH=python
	@mkdir -p build/dev
	export PATH="$(scripts):$$PATH"
	exec 9>build/dev.lock; flock 9
	[ -f build/dev/build.ninja ] || cmake -S . -B build/dev -G Ninja -DPython_EXECUTABLE="$$(command -v $(python))" \
	    -DWEFT_MODULE_DIR="$(CURDIR)/python/weft" >/dev/null
	cmake --build build/dev -j $(JOBS)

.PHONY: docs
docs: $(environment) ## write docs/api.md from the docstrings
	PYTHONPATH=python $(python) tools/generate_api_docs.py

.PHONY: clean
clean: ## remove what was built (the virtual environment stays)
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f python/weft/_native*.so

# One shell per recipe, so that PATH and locks hold for all its lines.
.ONESHELL:

# What running needs: torch and the tools that build the native module. `make demo` installs no more than that.
$(runtime): pyproject.toml constraints.txt tools/requirements.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Weft needs Python 3.10 or newer: make PYTHON=...")'
	if [ -n "$(strip $(VENV))" ] && [ ! -x "$(python)" ]; then $(PYTHON) -m venv "$(VENV)"; fi
	wanted=$$($(python) tools/requirements.py $(only_missing) dependencies build)
	if [ -n "$$wanted" ]; then
	  index=(); size="5 GB with CUDA"
	  if [ -n "$(TORCH_INDEX)" ] && grep -q ^torch <<<"$$wanted"; then
	    if $(python) -c 'import urllib.request as u; u.urlopen("$(TORCH_INDEX)/torch/", timeout=10)' 2>/dev/null; then
	      index=(--extra-index-url "$(TORCH_INDEX)"); size="1 GB"
	    else
	      echo "$(TORCH_INDEX) is out of reach; torch comes from pip's own index"
	    fi
	  fi
	  echo "[1/3] Installing torch and what builds Weft: $$size; about a minute if pip has it already"
	  tools/progress.sh build/requirements.log $(python) -m pip install --no-compile "$${index[@]}" $$wanted
	fi
	mkdir -p $(@D) && touch $@

$(environment): $(runtime)
	@wanted=$$($(python) tools/requirements.py $(only_missing))
	if [ -n "$$wanted" ]; then echo "Installing test tools and linters"; $(install) $$wanted; fi
	mkdir -p $(@D) && touch $@

# The package as a user would have it: not editable, built anew whenever one of its files is newer.
package_files := $(shell find python include src -type f ! -name '*.so' ! -path '*/__pycache__/*' 2>/dev/null)
$(installed): $(runtime) CMakeLists.txt pyproject.toml $(package_files)
	@echo "[2/3] Building and installing Weft: half a minute to two minutes of compiling"
	export PATH="$(scripts):$$PATH"
	tools/progress.sh build/install.log $(python) -m pip install -v --no-build-isolation --no-deps --force-reinstall .
	mkdir -p $(@D) && touch $@
