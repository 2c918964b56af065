# Ours beside vLLM: needs PEER=DIR, an environment in which vLLM 0.33.0 imports (see compat/vllm/README.md).
# DIR is read only. The wheel for its Python goes to build/peer, which PYTHONPATH puts in front of it.

PEER ?=
PEER_PYTHON = $(PEER)/bin/python
PEER_PATH = PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$(CURDIR)/build/peer
VLLM_ARGS ?=

.PHONY: test-vllm need-peer

need-peer:
	@test -n "$(PEER)" || { echo "which vLLM? make $(MAKECMDGOALS) PEER=DIR (compat/vllm/README.md says what DIR is)" >&2; exit 2; }
	@test -x "$(PEER_PYTHON)" || { echo "$(PEER_PYTHON) is missing: PEER is not an environment" >&2; exit 2; }

build/peer/installed: $(SOURCES) | need-peer
	@echo "building blockpool for $(PEER_PYTHON) (a minute or two)"
	@rm -rf build/peer build/peer-wheel
	@BLOCKPOOL_REQUIRE_COMPILED=1 $(PEER_PYTHON) $(PIP) wheel --no-deps --wheel-dir build/peer-wheel .
	@$(PEER_PYTHON) compat/vllm/runtime_needs.py > build/peer-wheel/needs.txt
	@$(PEER_PYTHON) $(PIP) install --no-deps --target build/peer build/peer-wheel/blockpool-*.whl -r build/peer-wheel/needs.txt
	@touch $@

test-vllm: build/peer/installed
	@COMPAT_PEER=$(PEER) PYTHONDONTWRITEBYTECODE=1 $(PEER_PYTHON) -m pytest -q -c /dev/null --rootdir compat/vllm -p no:cacheprovider -o asyncio_default_fixture_loop_scope=function compat/vllm/test_harness.py
	@$(PEER_PATH) compat/vllm/in_peer $(PEER) compat/vllm/fuzz.py --self-check
	@$(PEER_PATH) compat/vllm/in_peer $(PEER) compat/vllm/fuzz.py --json build/vllm-fuzz.json
	@$(PEER_PATH) compat/vllm/in_peer $(PEER) compat/vllm/events_compare.py
	@rm -f build/vllm-baseline.json
	@$(PEER_PYTHON) compat/vllm/compare.py --peer $(PEER) --with build/peer --baseline build/vllm-baseline.json --json build/vllm-tests.json $(VLLM_ARGS)
	@$(PEER_PYTHON) compat/vllm/compare.py --peer $(PEER) --with build/peer --manager --baseline build/vllm-baseline.json --json build/vllm-tests-manager.json $(VLLM_ARGS)
