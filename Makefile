# `make demo` and `make test` each work alone on a fresh machine with Python and git.
PYTHON ?= python3
VENV := .venv
COMMA := ,
BIN := $(VENV)/bin
# The libraries whose loops the doctor is tested on; without them those tests are skipped.
EXTRAS := dev$(if $(CI),$(COMMA)peers)

.PHONY: demo test check bench docs clean

$(VENV)/.demo: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo]'
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	touch $@ $(VENV)/.demo

$(VENV)/.bench: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	touch $@ $(VENV)/.demo

demo: $(VENV)/.demo
	$(BIN)/gradaccum demo

test: $(VENV)/.dev
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/check

bench: $(VENV)/.bench
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/bench

docs: $(VENV)/.dev
	$(BIN)/zensical build --strict --clean

clean:
	rm -rf $(VENV) site demo-out benchmarks/out
