# make replay   the main job: replay a workload through a block pool (TRACE="file ..." ARGS="--num-blocks 4096")
# make test     checks and all tests, on the compiled and on the pure build
# make long     the random tests in their long size
# make mutations   break the rules one by one in a copy of the source: does a test notice?
# make bench    the figures of docs/performance.md
# make check    ruff, mypy and the import contracts alone
# make test-vllm PEER=DIR   vLLM's own tests and random operations, on its pool and on ours (compat/vllm/README.md)
# make bench-vllm PEER=DIR  what vLLM gains by our pool and hasher in the place of its own (ARGS=--quick)

PYTHON ?= python3
COMPILED := .venv/compiled
PURE := .venv/pure
SOURCES := pyproject.toml setup.py MANIFEST.in $(shell find src -name '*.py' -o -name '*.c' -o -name '*.pyi')
PIP := -m pip --disable-pip-version-check --quiet
# files for `make replay`; without any it replays the built-in workload
TRACE ?=
ARGS ?=
PYTEST_ARGS ?=

.PHONY: help replay test test-compiled test-pure long mutations bench bench-vllm check clean

help:
	@sed -n 's/^# //p' Makefile

# Compiled where there is a compiler, pure elsewhere: `blockpool version` says which.
$(COMPILED)/installed: $(SOURCES)
	@test -x $(COMPILED)/bin/python || $(PYTHON) -m venv $(COMPILED)
	@echo "building blockpool into $(COMPILED) (a minute or two the first time)"
	@rm -rf build/wheel
	@$(COMPILED)/bin/python $(PIP) wheel --no-deps --wheel-dir build/wheel .
	@$(COMPILED)/bin/python $(PIP) install --force-reinstall --no-deps build/wheel/blockpool-*.whl
	@$(COMPILED)/bin/python $(PIP) install build/wheel/blockpool-*.whl
	@touch $@

$(COMPILED)/tested: $(COMPILED)/installed
	@$(COMPILED)/bin/python $(PIP) install "$$(ls build/wheel/blockpool-*.whl)[test,check]"
	@touch $@

$(PURE)/tested: pyproject.toml setup.py
	@test -x $(PURE)/bin/python || $(PYTHON) -m venv $(PURE)
	@echo "setting up $(PURE)"
	@BLOCKPOOL_PURE=1 $(PURE)/bin/python $(PIP) install -e '.[test]'
	@touch $@

replay: $(COMPILED)/installed
	@$(COMPILED)/bin/blockpool replay $(ARGS) $(TRACE)

test: check test-compiled test-pure

check: $(COMPILED)/tested
	$(COMPILED)/bin/ruff check .
	$(COMPILED)/bin/ruff format --check .
	$(COMPILED)/bin/mypy
	$(COMPILED)/bin/lint-imports --no-cache

test-compiled: $(COMPILED)/tested
	BLOCKPOOL_EXPECT=compiled $(COMPILED)/bin/python -m pytest -n 2 $(PYTEST_ARGS)

test-pure: $(PURE)/tested
	BLOCKPOOL_EXPECT=pure $(PURE)/bin/python -m pytest -n 2 $(PYTEST_ARGS)

long: $(COMPILED)/tested $(PURE)/tested
	BLOCKPOOL_LONG=1 BLOCKPOOL_EXPECT=compiled $(COMPILED)/bin/python -m pytest -n 2 $(PYTEST_ARGS)
	BLOCKPOOL_LONG=1 BLOCKPOOL_EXPECT=pure $(PURE)/bin/python -m pytest -n 2 $(PYTEST_ARGS)

mutations: $(PURE)/tested
	$(PURE)/bin/python tests/engine/mutations.py $(ARGS)

bench: $(COMPILED)/installed
	$(COMPILED)/bin/python benchmarks/run.py $(ARGS)

clean:
	rm -rf .venv build src/*.egg-info

include compat/vllm/peer.mk

bench-vllm: build/peer/installed
	@$(PEER_PATH) compat/vllm/in_peer $(PEER) compat/vllm/bench.py $(ARGS)
	@$(PEER_PATH) compat/vllm/in_peer $(PEER) compat/vllm/bench.py --manager --only groups serving long $(ARGS)
