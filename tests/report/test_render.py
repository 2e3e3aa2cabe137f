"""Whatever a template prints is bounded, escaped and free of control characters."""

import base64
import dataclasses
import fnmatch
import hashlib
import re
import tomllib
import xml.etree.ElementTree
from pathlib import Path

import jinja2
import pytest
from markup import Tags
from markupsafe import Markup

from notepad_jax.eval.measure import Result
from notepad_jax.eval.summary import ALL, Summary, share
from notepad_jax.reading.trace import MemoryChange
from notepad_jax.report import evaluation_page, quickstart_page, render, training_page
from notepad_jax.report.examples import example
from notepad_jax.report.origin import Next, Origin, SettingsChange
from notepad_jax.types import Finish

ROOT = Path(__file__).parents[2]
CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
HOSTILE = "\x1b]0;\x07\x9b</style></td>\"'><script>alert(1)</script>{{ 7 * 7 }}\ud800"
ENDLESS = HOSTILE + "x" * 10**6


def hostile_summary(length: int) -> Summary:
    half = share([1.0, 0.0])
    return Summary(
        method="notepad", source=ALL, length=length, questions=2, n=2, accuracy=half,
        scores={ENDLESS: half}, recall=half, lost={ENDLESS: 1}, unanswered=1, malformed=1,
        truncated=1, turns=2, tokens=2, seconds=1.0,
    )  # fmt: skip


EXAMPLE = example(
    ENDLESS,
    Result(
        task_id=ENDLESS, source=ENDLESS, method=ENDLESS, length=8, repeat=0, question=ENDLESS,
        gold=(ENDLESS, ENDLESS), metric=ENDLESS, answer=ENDLESS,
        correct=0.0, problem=ENDLESS, scores={},
        finish=Finish.STOP, failed=False,
        turns=2, tokens=8, recall=None, lost=ENDLESS, began=0.0, seconds=1.0, changes=1,
    ),
    [MemoryChange(0, ENDLESS, 3, 0.1, None)],
)  # fmt: skip
ORIGIN = Origin(ENDLESS, ENDLESS, ENDLESS, [Next(ENDLESS, ENDLESS)])
SUMMARIES = [hostile_summary(2048), hostile_summary(4096)]


def hostile_quickstart(folder: Path) -> Path:
    return quickstart_page.write(
        folder,
        quickstart_page.QuickstartReport(
            title=ENDLESS, summary=ENDLESS, origin=ORIGIN, starter=ENDLESS,
            train_length=2048, before=SUMMARIES,
            after=SUMMARIES, warnings=[ENDLESS], metrics=[], examples=[EXAMPLE],
            config={ENDLESS: ENDLESS}, timings={ENDLESS: 1.0},
        ),
    )  # fmt: skip


def hostile_evaluation(folder: Path) -> Path:
    return evaluation_page.write(
        folder,
        evaluation_page.EvaluationReport(
            title=ENDLESS, summary=ENDLESS, origin=ORIGIN, suite=ENDLESS,
            policy=ENDLESS, train_length=2048, by_length=SUMMARIES,
            examples=[EXAMPLE], settings={ENDLESS: [ENDLESS]}, published=False,
            by_task=[dataclasses.replace(s, source=ENDLESS) for s in SUMMARIES],
        ),
    )  # fmt: skip


def hostile_training(folder: Path) -> Path:
    kinds = {f"task/{ENDLESS}{k}/{name}": 1.0 for k in "ab" for name in ("groups", "reward")}
    return training_page.write(
        folder,
        training_page.TrainingReport(
            title=ENDLESS, summary=ENDLESS, origin=ORIGIN, warnings=[ENDLESS],
            metrics=[{"step": 1, **kinds}], curves={ENDLESS: ENDLESS}, lengths=[ENDLESS],
            validations=[training_page.ValidationPoint(1, 0.5, (0.5,), best=True)],
            config={ENDLESS: ENDLESS},
            changes=[SettingsChange(4, ENDLESS, ENDLESS, [(ENDLESS, ENDLESS, ENDLESS)])],
        ),
    )  # fmt: skip


@pytest.mark.parametrize("write", [hostile_quickstart, hostile_evaluation, hostile_training])
def test_no_field_of_a_page_can_break_it_or_grow_it(write, tmp_path):
    text = write(tmp_path).read_text()
    assert not CONTROL.search(text) and "\ufffd" in text
    assert max(map(len, re.findall("x+", text))) <= render.LONGEST_TEXT
    assert "more characters" in text and "{{ 7 * 7 }}" in text
    assert text.count("<script") == 1 == text.count("</script>") == text.count("</style>")
    tags = Tags()
    tags.feed(text)
    assert not tags.open
    drawings = [*tmp_path.glob("*.svg")]
    assert drawings and all(xml.etree.ElementTree.parse(path) for path in drawings)


def test_a_browser_runs_the_script_of_the_page_and_no_other(tmp_path):
    text = hostile_evaluation(tmp_path).read_text()
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    hashed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{hashed}'" in text
    assert "innerHTML" not in script and "fetch(" not in script


def test_what_is_shown_of_a_short_text_is_the_text_but_for_control_characters():
    words = "".join(map(chr, range(0x800)))
    shown = render.shown(words)
    assert len(shown) == len(words) and not CONTROL.search(shown)
    assert all(a == b or CONTROL.match(b) for a, b in zip(shown, words, strict=True))


def test_long_texts_are_cut_and_say_so():
    words = "a" * (render.LONGEST_TEXT + 1_234)
    assert render.shown(words) == "a" * render.LONGEST_TEXT + " ... (1,234 more characters)"
    made = Markup("<b>" + words)
    assert render.shown(made) is made  # what templates made of values that are bounded


def test_a_value_that_is_missing_is_an_error_and_leaves_the_page_as_it_was(tmp_path):
    path = tmp_path / "report.html"
    path.write_text("earlier")
    with pytest.raises(jinja2.UndefinedError, match="report"):
        render.write(path, "frame.html", {})
    assert path.read_text() == "earlier" and list(tmp_path.iterdir()) == [path]


def test_the_templates_are_shipped_with_the_package():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    shipped = settings["tool"]["setuptools"]["package-data"]["notepad_jax.report"]
    folder = ROOT / "notepad_jax" / "report"
    there = [str(path.relative_to(folder)) for path in (folder / "templates").iterdir()]
    assert len(there) == 31
    assert [name for name in there if not any(fnmatch.fnmatch(name, p) for p in shipped)] == []
