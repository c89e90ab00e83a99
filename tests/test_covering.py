"""The cases that the default run takes are few and hold every combination that they should."""

from itertools import combinations, product
from pathlib import Path

import pytest
from covering import covering

pytest_plugins = ["pytester"]
SIZES = (22, 19, 3)


@pytest.mark.slow
@pytest.mark.parametrize("strength", [1, 2, 3])
def test_each_combination_of_values_is_held_by_a_case(strength: int) -> None:
    cases = [case for case in product(*map(range, SIZES)) if sum(case) % 7]
    taken = [cases[number] for number in covering(cases, strength)]
    for axes in combinations(range(len(SIZES)), strength):
        held = {tuple(case[axis] for axis in axes) for case in cases}
        assert {tuple(case[axis] for axis in axes) for case in taken} == held


@pytest.mark.parametrize(("sizes", "strength", "most"), [(SIZES, 1, 22), (SIZES, 2, 440), ((4, 4, 4, 4), 2, 28)])
def test_few_cases_are_taken(sizes: tuple[int, ...], strength: int, most: int) -> None:
    assert len(covering(list(product(*map(range, sizes))), strength)) <= most


def test_a_function_of_one_case_or_of_one_parameter_keeps_all() -> None:
    assert covering([()], 2) == [0]
    assert covering([(0,), (1,), (2,)], 2) == [0, 1, 2]


@pytest.mark.slow
def test_the_default_run_leaves_the_other_cases_to_the_exhaustive_one(pytester: pytest.Pytester) -> None:
    root = Path(__file__).parent
    pytester.makeconftest((root / "conftest.py").read_text(encoding="utf-8"))
    pytester.makepyprojecttoml((root.parent / "pyproject.toml").read_text(encoding="utf-8"))
    pytester.makepyfile(
        covering=(root / "covering.py").read_text(encoding="utf-8"),
        tests__test_it="""
            import pytest
            from covering import by_default

            @pytest.fixture(params=[1, 2])
            def threads(request):
                return request.param

            LARGE = pytest.param(2, 2, marks=pytest.mark.exhaustive)

            @pytest.mark.covering(1)
            @pytest.mark.parametrize(("N", "K"), [(1, 1), (1, 2), (2, 1), LARGE])
            @pytest.mark.parametrize("name", [["a"], ["b"]])
            def test_product(name, N, K, threads): ...

            @pytest.mark.parametrize("size", by_default((1,), (1, 2)))
            def test_sizes(size): ...

            @pytest.mark.exhaustive
            def test_long(): ...
        """,
    )
    (pytester.path / "tests").mkdir()
    (pytester.path / "tests__test_it.py").rename(pytester.path / "tests" / "test_it.py")
    assert collected(pytester) == {
        "test_product[1-name0-1-1]",
        "test_product[2-name1-1-2]",
        "test_product[1-name0-2-1]",
        "test_sizes[1]",
    }
    assert len(collected(pytester, "-m", "")) == 19


def collected(pytester: pytest.Pytester, *options: str) -> set[str]:
    lines = pytester.runpytest_inprocess("--collect-only", "-q", "-p", "no:xdist", *options).outlines
    return {line.partition("::")[2] for line in lines if "::" in line}
