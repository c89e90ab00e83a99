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
	python -m benchmarks.quality
	trainweights demo --json > benchmarks/results/demo.json
	python -m benchmarks.run --peers
	python -m benchmarks.checkpoints
	python -m benchmarks.tables
