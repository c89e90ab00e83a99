.PHONY: check fix quick test slow-tests fuzz soak docs bench
check:
	ruff check .
	ruff format --check .
	pyright

fix:
	ruff check --fix .
	ruff format .

quick:
	pytest -n 2 -m "not slow"

test:
	pytest -n 2

slow-tests:
	pytest -n 2 --junitxml=build/whole.xml
	python tests/slow_tests.py build/whole.xml
	pytest -n 2 -m "not slow" --junitxml=build/quick.xml
	python tests/slow_tests.py build/whole.xml build/quick.xml

soak:
	python -m tests.soak --seconds $(or $(SECONDS),600)

docs:
	NO_MKDOCS_2_WARNING=1 mkdocs build

bench:
	python -m benchmarks.quality
	trainweights demo --json > benchmarks/results/demo.json
	python -m benchmarks.run --peers
	python -m benchmarks.checkpoints
	python -m benchmarks.abilities
	PYTHONPATH=tests python -m benchmarks.exports
	python -m benchmarks.programs
	python -m benchmarks.at_a_glance
	python -m benchmarks.tables

fuzz:
	python -m tests.fuzz --seconds $(or $(SECONDS),600)
