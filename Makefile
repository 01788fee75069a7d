# make run      score the sample data end to end and look at some lists
# make test     run the tests
# make test-vllm  the backends' conformance tests with vLLM, in an environment of its own
# make movielens  the whole loop on real data: examples/movielens
# make check    lint, types and tests: what decides whether a change lands
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: run test test-vllm lint types check bench sample-data movielens clean

run: $(READY)
	$(BIN)/prefill-score run sample_data/prompts.parquet --overwrite
	$(BIN)/prefill-score show prompts.topk

test: $(READY)
	$(BIN)/pytest --numprocesses 2 --dist loadfile

# The vLLM half of what every backend has to give; the other half is among the tests. It takes some minutes.
VLLM := .venv-vllm

test-vllm: $(VLLM)/.ready
	$(VLLM)/bin/pytest -m vllm tests/test_backend_conformance.py tests/test_examples.py

$(VLLM)/.ready: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --constraint constraints-vllm.txt torch
	$(VLLM)/bin/pip install --quiet --no-deps --requirement constraints-vllm.txt
	$(VLLM)/bin/pip install --quiet --no-deps --editable .
	@touch $@

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

check: lint types test

bench: $(READY)
	$(BIN)/prefill-score bench sample_data/prompts.parquet

sample-data: $(READY)
	$(BIN)/python sample_data/make_sample_data.py

MOVIELENS := ../../$(BIN)/prefill-score

movielens: $(READY)
	$(BIN)/python examples/movielens/prepare.py
	$(BIN)/python examples/movielens/train.py --refit
	cd examples/movielens && $(MOVIELENS) embed out/tokens.parquet -m out/model-1 --id-column item_id --token-ids-column token_ids --from-lm-head --keep-columns title,year -o out/items-1.parquet --overwrite
	cd examples/movielens && $(MOVIELENS) embed out/tokens.parquet -m out/model-2 --id-column item_id --token-ids-column token_ids --from-lm-head --keep-columns title,year -o out/items-2.parquet --overwrite
	cd examples/movielens && $(MOVIELENS) run out/prompts.parquet -m out/model-1 -i out/items-1.parquet -o out/one --overwrite
	cd examples/movielens && $(MOVIELENS) evaluate out/one --truth next_item --top-k 10
	cd examples/movielens && $(MOVIELENS) embed out/prompts.parquet -m out/model-1 --keep-columns seen_items,next_item -o out/users-1.parquet --overwrite
	cd examples/movielens && $(MOVIELENS) embed out/prompts.parquet -m out/model-2 --keep-columns seen_items,next_item -o out/users-2.parquet --overwrite
	$(BIN)/python examples/movielens/side_by_side.py examples/movielens/out/items-1.parquet examples/movielens/out/items-2.parquet -o examples/movielens/out/items.parquet
	$(BIN)/python examples/movielens/side_by_side.py examples/movielens/out/users-1.parquet examples/movielens/out/users-2.parquet -o examples/movielens/out/users.parquet
	cd examples/movielens && $(MOVIELENS) search out/users.parquet -o out/topk --overwrite
	cd examples/movielens && $(MOVIELENS) show out/topk
	cd examples/movielens && $(MOVIELENS) evaluate out/topk --truth next_item --top-k 10

clean:
	rm -rf prompts.topk .prompts.topk.* build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# One environment for everything. The constraints file makes it the set that was tested, whatever has come out since.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "prefill-score needs Python 3.11 or newer; say which: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@
