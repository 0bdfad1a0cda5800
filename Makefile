# make demo, make test: all that a fresh machine with Python >= 3.10 needs; neither needs a GPU.
#
#   make test PYTHON=python3.12           another Python
#   make test VENV= PYTHON=/path/python   a Python that has torch and the tools already: nothing is installed

PYTHON ?= python3
VENV ?= .venv

ifeq ($(strip $(VENV)),)
RUN := $(PYTHON)
STAMP :=
DOCS_STAMP :=
else
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs
endif

# Workers, ranks and commands of the tests are new processes: they load what others have compiled.
unexport PYTHONDONTWRITEBYTECODE

# The pinned torch goes first and alone, so that its CPU build is taken where the index has one.
TORCH := $(shell sed -n 's/.*"\(torch==[^"]*\)".*/\1/p' pyproject.toml)

.PHONY: help demo test test-all check docs tables kernels venv clean
help:
	@echo "make demo      a tensor-parallel layer on four processes"
	@echo "make test      linters, types, tests; of exhaustive tests a sample"
	@echo "make test-all  the same with all cases of exhaustive tests"
	@echo "make docs      the documentation, in site/"
	@echo "make tables    the generated tables in docs/, anew"
	@echo "make kernels   the wheel distgemm-kernels, in dist/; it compiles for some minutes on many cores"

demo: $(STAMP)
	$(RUN) -m distgemm demo

test: check
	$(RUN) -m pytest tests/gpu
	$(RUN) -m pytest -n auto --dist loadfile --ignore tests/gpu

test-all: check
	$(RUN) -m pytest tests/gpu
	$(RUN) -m pytest -n auto --dist loadfile --ignore tests/gpu --exhaustive all

check: $(STAMP)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy -p distgemm

docs: $(DOCS_STAMP)
	$(RUN) docs/tables.py --check
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

tables: $(STAMP)
	$(RUN) docs/tables.py

kernels: $(STAMP)
	$(RUN) -m distgemm build --pack dist

venv: $(STAMP)

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "distgemm needs Python >= 3.10, $(PYTHON) is $$($(PYTHON) -V 2>&1); say make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || \
	    { echo "$(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --disable-pip-version-check --quiet $(TORCH)
	$(RUN) -m pip install --disable-pip-version-check --quiet -e '.[dev]'
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(RUN) -m pip install --disable-pip-version-check --quiet -e '.[docs]'
	@touch $@

clean:
	rm -rf $(VENV) site build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
