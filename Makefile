# Two commands do everything: `make demo` and `make test`. The rest serves whoever changes the code.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STORE  ?= local
STAMP  := $(VENV)/.installed

.PHONY: demo test test-nightly test-vllm fuzz check format clean

demo: $(STAMP)
	$(BIN)/python -m tools.demo --store $(STORE)

# Tests run side by side in so many processes: many wait for others or for the disk, so one more than two cores.
JOBS ?= 3

test: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

# The same with many more rounds of kills, races and interruptions; it takes several times as long.
test-nightly: $(STAMP)
	DELTASTORE_THOROUGH=1 DELTASTORE_PROFILE=nightly $(BIN)/python -m pytest

# The adapter for vLLM against the real thing on the CPU (2.5 GB, in an environment of its own; a quarter of an hour).
VLLM_VENV  ?= .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed

test-vllm: $(STAMP) $(VLLM_STAMP)
	DELTASTORE_VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python $(BIN)/python -m pytest -v --timeout 900 tests/vllm

$(VLLM_STAMP): tools/vllm_environment.py
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python tools/vllm_environment.py
	touch $@

# At least this many random and damaged bytes through each of the decoders.
FUZZ_BYTES ?= 10000000

fuzz: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m fuzzing --bytes $(FUZZ_BYTES)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The constraints file pins torch for our own environments only; the library accepts a range.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --editable '.[test,demo]'
	touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV)
