# foresay: `make install`, `make test`, `make lint`, `make run`, `make bench`, `make clean`.
#
# VENV=DIR         the environment (.venv)
# PYTHON=python3   the interpreter it is made with: 3.11 or 3.12
# TORCH_INDEX=URL  where to take torch from, e.g. an index of CPU builds; else pip's own index
# JOBS=2           how many processes run the tests
# ARGS="..."       more arguments for pytest, `make run` or `make bench`
#
# `make bench` asks whether foresay has got slower: it keeps a history in .bench/. To compare proposers on
# prompts there is `.venv/bin/foresay bench`.

VENV ?= .venv
PYTHON ?= $(shell for python in python3.11 python3.12 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info[:2] not in [(3, 11), (3, 12)])' 2>/dev/null \
	&& { echo $$python; break; }; done)
TORCH_INDEX ?=
JOBS ?= 2
ARGS ?=

PLUGINS := $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml))
PLUGIN_PACKAGES := $(filter-out %.egg-info,$(notdir $(patsubst %/,%,$(wildcard plugins/*/src/foresay_*/))))
PROJECTS := pyproject.toml $(addsuffix /pyproject.toml,$(PLUGINS))
KERNELS := $(wildcard core/worker/kernels/*.c core/worker/kernels/*.h)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP := $(VENV)/.installed
SHIPPED := $(VENV)/shipped

.DEFAULT_GOAL := help
.PHONY: help install run bench test lint clean

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' $(firstword $(MAKEFILE_LIST))

install: $(STAMP)

# torch comes first, and alone: what is installed already satisfies foresay's own wider range.
# setuptools warns of every editable install whose package has the root's name: that is how it is meant here.
$(STAMP): $(PROJECTS) $(KERNELS) constraints-cpu.txt
	@test -n "$(PYTHON)" || { echo "error: foresay needs Python 3.11 or 3.12; make PYTHON=..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c constraints-cpu.txt pip setuptools
	$(PIP) install --quiet -c constraints-cpu.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	PYTHONWARNINGS=ignore $(PIP) install --quiet --no-build-isolation -c constraints-cpu.txt -e ".[dev,gguf]" $(addprefix -e ./,$(PLUGINS))
	@touch $@

run: install
	@$(BIN)/foresay showcase $(ARGS)

bench: install
	@$(BIN)/python tests/regression.py $(ARGS)

test: install
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile $(ARGS)

# mypy sees no editable install, so it reads what would be shipped. Stale build folders would be shipped too.
lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@rm -rf build plugins/*/build $(SHIPPED)
	$(PIP) install --quiet --no-deps --no-build-isolation --no-index --target $(SHIPPED) . $(addprefix ./,$(PLUGINS))
	@rm -rf build plugins/*/build
	MYPYPATH=$(SHIPPED) $(BIN)/mypy -p foresay $(addprefix -p ,$(PLUGIN_PACKAGES))

clean:
	rm -rf $(VENV) build dist plugins/*/build plugins/*/dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -f core/worker/kernels/*.so
	find . -name __pycache__ -prune -exec rm -rf {} + -o -name "*.egg-info" -prune -exec rm -rf {} +
