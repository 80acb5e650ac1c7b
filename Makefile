# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
ARGS   ?=

.PHONY: setup demo test test-slow lint clean

$(READY): requirements.txt engine/demo/requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info < (3, 14) else "SpecPilot needs Python 3.11 to 3.13; this is " + sys.version.split()[0] + ". Name another one: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r engine/demo/requirements.txt
	@touch $(READY)

setup: $(READY)

demo: $(READY)
	@exec $(BIN)/python manage.py up --demo $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest $(ARGS)

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
