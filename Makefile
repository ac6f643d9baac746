.PHONY: install format lint types test test-slow docs benchmark tables

install:
	pip install -c constraints.txt -e ".[dev]"

format:
	ruff check --fix .
	ruff format .

lint:
	ruff check .
	ruff format --check .

types:
	mypy

test:
	pytest -q -n 2

test-slow:
	pytest -q -m slow

docs:
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict -f docs/site/mkdocs.yml

benchmark:
	ctr-pe benchmark

tables:
	python -m benchmark.published
