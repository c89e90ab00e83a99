.PHONY: check fix quick test exhaustive fuzz soak mutants docs bench release
check:
	ruff check .
	ruff format --check .
	pyright

fix:
	ruff check --fix .
	ruff format .

quick:
	pytest -n 2 -m "not exhaustive and not slow"

test:
	pytest -n 2

exhaustive:
	pytest -n 2 -m "" --junitxml=build/exhaustive.xml
	python -m benchmarks.exhaustive build/exhaustive.xml
	python -m benchmarks.tables

soak:
	python -m tests.soak --seconds $(or $(SECONDS),600)

mutants:
	python -m tests.mutants --record benchmarks/results/mutants.json
	python -m benchmarks.tables

docs:
	NO_MKDOCS_2_WARNING=1 mkdocs build

bench:
	python -m benchmarks.quality
	python -m benchmarks.embeddings
	trainweights demo --json > benchmarks/results/demo.json
	python -m benchmarks.run --peers
	python -m benchmarks.checkpoints
	python -m benchmarks.checkpoints.cores
	python -m benchmarks.abilities
	PYTHONPATH=tests python -m benchmarks.exports
	PYTHONPATH=tests python -m benchmarks.compressed_tensors
	python -m benchmarks.programs
	python -m benchmarks.at_a_glance
	python -m benchmarks.ages
	python -m benchmarks.tables

fuzz:
	PYTHONPATH=tests python -m tests.fuzz --seconds $(or $(SECONDS),600)

release:
	.ci/release
