# Two commands start everything: `make demo` and `make test`. Both need only Python 3.11 or later.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test install install-dev format lint types layers unit smoke docs bench clean

demo: install  ## train a small language model in low precision and write a report
	$(BIN)/narrowcast train quickstart

test: install-dev  ## the whole gate; a test builds the documentation
	$(MAKE) --no-print-directory -j 4 lint types layers unit

# torch comes first and alone, so that nothing else pulls another build of it.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

install: $(VENV)/installed

install-dev: $(VENV)/installed-dev

format:
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lint: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install-dev
	$(BIN)/mypy

layers: install-dev
	$(BIN)/lint-imports

# One torch thread per worker, so that workers do not compete for the cores. A file stays in one
# worker, so that its fixtures are built once. Slow files come first, in the order of folders.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist loadfile --no-loadscope-reorder -m "not gpu"
unit: install-dev
	$(PYTEST)

# Wide and quick, for between two edits: laws, policies, steps, checkpoints, one real run.
SMOKE := laws config numerics cli/test_entry.py cli/test_plan.py
SMOKE += $(addprefix training/checkpoints/,test_checkpoint.py test_resume.py)
SMOKE += $(addprefix precision/,plan gradients test_resume.py step/test_prepare.py weights/test_master.py)
smoke: install-dev
	$(PYTEST) $(addprefix tests/,$(SMOKE))

docs: install-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: install-dev
	$(BIN)/python benchmarks/engine.py

clean:
	rm -rf $(VENV) site build
