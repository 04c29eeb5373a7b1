# Everything runs in .venv, which the first target that needs it makes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
SOURCES := cluster workers kernels router src tests benchmarks

.PHONY: install serve test check format bench soak kernels-report clean

install: $(INSTALLED)

serve: $(INSTALLED)  ## fetch the default model, start Ray, serve it; ARGS go to `pageray serve`
	$(BIN)/pageray serve $(ARGS)

# What needs no Ray cluster runs in two processes at once; clusters want the machine for themselves.
test: $(INSTALLED)  ## all tests that need no GPU; with ARGS, `pytest ARGS` alone
	$(BIN)/pageray fetch smollm2-135m
ifdef ARGS
	$(BIN)/python -P -m pytest $(ARGS)
else
	$(BIN)/python -P -m pytest -m "not gpu and not ray" -n 2
	$(BIN)/python -P -m pytest -m "ray and not gpu"
endif

check: $(INSTALLED)  ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -P .ci/check_types.py

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)  ## one engine on this machine; ARGS go to `pageray bench engine`
	$(BIN)/pageray bench engine --requests 32 --input-len 128 --output-len 64 $(ARGS)

soak: $(INSTALLED)  ## kill parts of a cluster under load for ten minutes; ARGS go to `pageray soak`
	$(BIN)/pageray soak $(ARGS)

kernels-report: $(INSTALLED)  ## registers, shared memory and spills of every Triton kernel; ARGS="--out FILE"
	$(BIN)/python -P -m pageray.kernels.gpu.compile_report $(ARGS)

# Only pyproject.toml decides what is installed; the package itself is a link to this folder.
$(INSTALLED): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build .pytest_cache .ruff_cache .hypothesis
