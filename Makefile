.PHONY: check fix test bench
check:
	ruff check .
	ruff format --check .
	pyright

fix:
	ruff check --fix .
	ruff format .

test:
	pytest -n 2

bench:
	set -e; for file in benchmarks/[a-z]*.py; do python -m benchmarks.$$(basename $$file .py); done
	python -m benchmarks.checkpoints
	python -m benchmarks.tables
