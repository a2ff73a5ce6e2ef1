# Two commands do everything: `make demo` and `make test`. The rest serves whoever changes the code.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STORE  ?= local
STAMP  := $(VENV)/.installed

.PHONY: demo test test-nightly fuzz check format clean

demo: $(STAMP)
	$(BIN)/python -m tools.demo --store $(STORE)

test: $(STAMP)
	$(BIN)/python -m pytest

# The same with many more rounds of kills, races and interruptions; it takes several times as long.
test-nightly: $(STAMP)
	DELTASTORE_THOROUGH=1 DELTASTORE_PROFILE=nightly $(BIN)/python -m pytest

# At least this many random and damaged bytes through each of the decoders.
FUZZ_BYTES ?= 10000000

fuzz: $(STAMP)
	$(BIN)/python tests/fuzzing.py --bytes $(FUZZ_BYTES)

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
	rm -rf $(VENV)
