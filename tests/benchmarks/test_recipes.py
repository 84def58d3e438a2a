"""The table of recipes: its arithmetic on made-up runs, and that its methods are those of the examples."""

import ast

import pytest

from example_runs import EXAMPLES
from recipes import RECIPES, Recipe, Run, table, time_to


def run(value: float, cpu_s: float, *, without: str = "", length: str = "1ep") -> Run:
    return Run(without=without, length=length, value=value, baseline=3.0, cpu_s=cpu_s, wall_s=cpu_s / 2)


@pytest.mark.parametrize(
    ("goal", "short", "long", "higher", "expected"),
    [
        (2.0, 2.0, 1.0, False, "10"),  # the run that set the goal
        (2.0, 1.5, 1.0, False, "< 10"),
        (2.0, 3.0, 1.0, False, "20"),  # half the way
        (2.0, 3.0, 2.5, False, "not reached"),
        (0.5, 0.4, 0.6, True, "20"),
        (0.5, 0.6, 0.4, True, "< 10"),
    ],
)
def test_time_to_quality_is_interpolated_between_two_run_lengths(goal, short, long, higher, expected):
    assert time_to(goal, [run(short, 10.0), run(long, 30.0)], higher_is_better=higher) == expected


def test_a_table_has_a_row_for_each_method():
    recipe = Recipe(script="x.py", methods=("a",), lengths=("1ep", "2ep"))
    runs = [
        run(value, cpu, without=without, length=length)
        for without, length, value, cpu in [
            ("", "1ep", 2.0, 10),
            ("", "2ep", 1.0, 30),
            ("a", "1ep", 3.0, 5),
            ("a", "2ep", 1.0, 9),
        ]
    ]
    assert table("x", recipe, runs).splitlines() == [
        "### x, 2ep, baseline 3",
        "",
        "| | quality | processor s | wall s | processor s to 2 |",
        "|---|---|---|---|---|",
        "| all methods | 1 | 30 | 15 | 10 |",
        "| without a | 1 | 9 | 4 | 7 |",
    ]


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_methods_match_the_without_choices_of_the_example(name):
    tree = ast.parse((EXAMPLES / RECIPES[name].script).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and [a.value for a in node.args if isinstance(a, ast.Constant)] == ["--without"]:
            choices = next(word.value for word in node.keywords if word.arg == "choices")
            break
    if isinstance(choices, ast.Name):
        assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
        choices = next(node.value for node in assigned if ast.unparse(node.targets[0]) == choices.id)
    assert tuple(ast.literal_eval(choices)) == RECIPES[name].methods
