.PHONY: install format lint types test test-slow benchmark

install:
	pip install -c constraints.txt -e ".[dev]"

format:
	ruff check --fix .
	ruff format .

lint:
	ruff check .
	ruff format --check .

types:
	python .ci/types.py

test:
	pytest -q -n 2

test-slow:
	pytest -q -m slow

benchmark:
	ctr-pe benchmark
