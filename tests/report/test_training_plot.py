"""The charts of a training run: kinds of task are lines where there are several."""

import pytest

from notepad_jax.report import training_plot
from notepad_jax.report.training_plot import KINDS, by_task


def line(step, **of_kind):
    """A line of metrics; `of_kind` are groups by kind, `__` for a slash."""
    made = {"step": step, "reward": 0.5}
    for kind, groups in of_kind.items():
        name = f"task/{kind.replace('__', '/')}"
        made |= {f"{name}/groups": groups, f"{name}/reward": groups / 10}
        made |= {f"{name}/informative_share": 0.5, f"{name}/advantage_share": 0.25}
    return made


def lines_of(metrics, title):
    (found,) = [chart for chart in training_plot.charts(metrics) if chart.title == title]
    return {one.label: list(one.y) for one in found.lines}


def test_one_kind_of_task_has_no_charts_of_its_own():
    metrics = [line(1, only=3), line(2, only=4)]
    assert [chart.title for chart in training_plot.charts(metrics)] == ["Reward"]
    assert by_task([{"step": 1}]) == []


def test_each_kind_of_task_is_a_line_without_what_all_begin_with():
    metrics = [line(1, synthetic__one_hop=3, synthetic__two_hop=5), line(2, synthetic__one_hop=4)]
    told = lines_of(metrics, "Reward, by kind of task")
    assert told == {"two_hop": [0.5], "one_hop": [0.3, 0.4]}
    titles = [chart.title for chart in training_plot.charts(metrics)]
    assert titles[1:] == list(training_plot.BY_TASK.values())


def test_of_many_kinds_the_most_frequent_are_drawn_and_it_is_said():
    kinds = {f"kind{k}": k + 1 for k in range(9)}
    told = lines_of([line(1, **kinds)], f"Reward, by kind of task ({KINDS} of 9)")
    assert list(told) == ["kind8", "kind7", "kind6", "kind5", "kind4"]


@pytest.mark.parametrize("name", ["x" * 60, "long/" * 11])
def test_long_names_that_begin_alike_stay_apart(name):
    metrics = [line(1, **{f"a{name}1": 3, f"a{name}2": 2, "b": 1})]
    labels = list(lines_of(metrics, "Reward, by kind of task"))
    assert len(set(labels)) == 3 and all(len(label) <= 31 for label in labels)
    assert labels[2] == "b"
