"""The page of a trace in a browser, where there is one: opened from a disk and worked by keys."""

import json

import pytest

from notepad_jax.reading.trace import Trace
from notepad_jax.report import trace_page
from notepad_jax.report.trace_page import TraceSource
from tests.report.made_traces import endless, evaluation, hostile, parallel, training
from tests.support.chromium import CHROMIUM, Browser

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def shown(browser, tmp_path):
    """Opens the page of some traces; afterwards nothing went wrong and nothing was fetched."""
    browser.requests.clear()
    browser.problems.clear()
    folder = tmp_path / "page"

    def put(path, content):
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)

    def show(*paths, address=""):
        traces = [Trace(path) for path in paths]
        trace_page.make(put, "made", [TraceSource(t.path.stem, t) for t in traces])
        browser.open("about:blank")
        browser.open((folder / "index.html").as_uri() + address)
        browser.wait("document.querySelector('#detail .question')")
        return browser

    yield show
    assert browser.problems == []
    assert all(address.startswith(folder.as_uri()) for address in browser.requests
               if address != "about:blank")  # fmt: skip


def text(browser, selector):
    return browser.ask(f"document.querySelector({json.dumps(selector)})?.innerText")


def texts(browser, selector):
    return browser.ask(
        f"[...document.querySelectorAll({json.dumps(selector)})].map((one) => one.innerText)"
    )


def turned(browser, turn, reading=1):
    """Waits until a turn is shown; the address names it."""
    browser.wait(f"location.hash.startsWith('#reading={reading}&turn={turn}')")
    browser.wait(
        f"document.querySelector('#detail .top .dim').innerText.startsWith('turn {turn:,} ')"
    )


def test_a_reading_is_gone_through_by_keys(shown, tmp_path):
    browser = shown(training(tmp_path / "one.jsonl"))
    turned(browser, 1)
    assert texts(browser, "#turns .asked") == ["chunk 1", "chunk 2", "chunk 3", "answer"]
    assert texts(browser, "#detail ins") == ["Rex is king ."]
    browser.press("]")
    turned(browser, 3)
    assert (texts(browser, "#detail del"), texts(browser, "#detail ins")) == (
        [" ."],
        [" , says Ada"],
    )
    assert texts(browser, "#detail mark") == ["king"]
    browser.press("ArrowRight")
    turned(browser, 4)
    assert text(browser, "#detail h2") == "Answer" and "Rex" in texts(browser, "#detail q")
    browser.press("[", "ArrowLeft", "ArrowLeft", "ArrowLeft")  # stops at the first
    turned(browser, 1)
    browser.press("n", "]")
    turned(browser, 3, reading=2)
    assert "lost" in texts(browser, ".evidence b")
    assert "lost at chunk 3" in texts(browser, ".evidence button")
    browser.ask("document.getElementById('readings').focus()")
    browser.press("Home")
    turned(browser, 1)
    browser.press("Tab", "Tab", "End")  # over the box that folds, to the turns
    turned(browser, 4)
    browser.press("?")
    assert browser.ask("document.getElementById('help').open")
    browser.press("Escape")
    browser.wait("!document.getElementById('help').open")


def test_turns_that_changed_nothing_are_folded(shown, tmp_path):
    browser = shown(evaluation(tmp_path / "one.jsonl", turns=9))
    assert texts(browser, "#turns .row") == [
        "chunk 1\n1 tokens",
        "chunks 2 to 8: nothing changed",
        "answer",
    ]
    browser.ask("document.getElementById('turns').focus()")
    browser.press("ArrowDown", "Enter")
    browser.wait("document.querySelectorAll('#turns .row').length === 9")
    browser.press("f")
    browser.press("f")
    browser.wait("document.querySelectorAll('#turns .row').length === 3")


def test_tokens_prompts_and_colours_where_the_trace_has_them(shown, tmp_path):
    browser = shown(training(tmp_path / "one.jsonl", groups=2), address="#reading=4&turn=2")
    turned(browser, 2, reading=4)
    assert texts(browser, ".tokens span") == ["Rex", " is", " king", "<|im_end|>"]
    assert texts(browser, ".tokens .special") == ["<|im_end|>"]
    browser.ask("document.querySelector('#detail summary').click()")
    browser.wait("document.querySelectorAll('.tokens').length === 3")
    shared, own = texts(browser, "#detail details .tokens")
    assert shared.startswith("<|im_start|> who?Rex")  # which sample 0 of its group has
    assert own.startswith(" who?") and "⟨202E⟩" in own
    offered = texts(browser, "select[name=by-colour] option")
    names = ["reward", "advantage", "staleness", "logprob", "logprob gap"]
    assert offered == ["no colours", *(f"colour by {name}" for name in names)]
    for name, painted in (
        ("advantage", "#readings .shaded"),
        ("logprob gap", ".tokens .shaded"),
        ("logprob", ".tokens .shaded"),
    ):
        browser.ask(
            "(() => { const one = document.querySelector('select[name=by-colour]');"
            f"one.value = '{name}'; one.dispatchEvent(new Event('change')); }})()"
        )
        browser.wait(f"document.querySelectorAll('{painted}').length >= 4")
    share = browser.ask(
        "document.querySelectorAll('.tokens .shaded')[1].style.getPropertyValue('--share')"
    )
    assert float(share) == pytest.approx(2.5 / 4)


def test_a_prompt_whose_data_are_gone_says_so_and_is_tried_again(shown, tmp_path):
    browser = shown(training(tmp_path / "one.jsonl", groups=2), address="#reading=4&turn=2")
    turned(browser, 2, reading=4)
    browser.ask("window.whole = trace.head, trace.head = async () => { throw new Error('gone'); }")
    press = "document.querySelector('#detail summary').click()"
    browser.ask(press)
    browser.wait("document.querySelector('#detail details .wrong')?.innerText === 'gone'")
    browser.ask("void (trace.head = window.whole)")
    browser.ask("location.hash = '#reading=1&turn=1'")  # what failed is not kept
    turned(browser, 1)
    browser.ask("location.hash = '#reading=4&turn=2'")
    turned(browser, 2, reading=4)
    browser.wait("document.querySelectorAll('#detail details .tokens').length === 2")


def test_what_a_trace_does_not_know_is_not_offered(shown, tmp_path):
    browser = shown(evaluation(tmp_path / "one.jsonl"))
    assert texts(browser, "select[name=by-colour] option") == ["no colours", "colour by reward"]
    assert texts(browser, "#choices select") == [] == texts(browser, "#choices input")
    assert "no prompt and no tokens" in text(browser, "#detail")


def test_readings_of_a_question_stand_beside_each_other(shown, tmp_path):
    one, two = training(tmp_path / "before.jsonl"), training(tmp_path / "after.jsonl")
    browser = shown(one, two, address="#reading=1&turn=1&beside")
    browser.wait("document.querySelectorAll('.peers article').length === 3")
    assert texts(browser, ".peers .asked") == [
        "before · step 1 · sample 1", "after · step 1 · sample 0", "after · step 1 · sample 1",
    ]  # fmt: skip
    assert texts(browser, ".peers p") == [
        "they part at chunk 3", "the same memories all the way", "they part at chunk 3",
    ]  # fmt: skip
    browser.ask("document.querySelector('.peers p button').click()")
    turned(browser, 3)
    browser.wait("document.querySelectorAll('.peers article').length === 3")
    assert texts(browser, ".peers article:first-child ins") == [" sleeps"]
    browser.ask("document.querySelector('.peers .asked').click()")
    turned(browser, 3, reading=2)
    browser.press("s")
    browser.wait("!document.querySelector('.peers')")


def test_readings_are_narrowed_down(shown, tmp_path):
    browser = shown(training(tmp_path / "one.jsonl", groups=3), evaluation(tmp_path / "two.jsonl"))

    def narrowed(name, value):
        browser.ask(
            f"(() => {{ const one = document.forms.filter.elements[{json.dumps(name)}];"
            f"one.value = {json.dumps(value)};"
            "one.dispatchEvent(new Event('input', { bubbles: true })); })()"
        )
        return text(browser, "output")

    assert text(browser, "output") == "7 of 7"
    assert narrowed("reward-from", "0.5") == "4 of 7"
    assert narrowed("step-to", "2") == "2 of 7"
    assert narrowed("step-to", "") == "4 of 7"
    assert narrowed("by-source", "1") == "1 of 7"
    assert narrowed("by-source", "") == "4 of 7"
    assert narrowed("words", "KING rex") == "3 of 7"
    assert narrowed("words", "no such") == "0 of 7"
    browser.ask("document.body.focus()")


def test_nothing_that_was_read_or_written_breaks_the_page(shown, tmp_path):
    browser = shown(hostile(tmp_path / "one.jsonl"))
    browser.press("]")
    turned(browser, 2)
    assert browser.ask("document.title") == "made"
    assert browser.ask("document.querySelectorAll('img, #detail script').length") == 0
    said = text(browser, "#detail")
    assert "<script>" in said and "⟨1B⟩]0;owned⟨07⟩" in said and "⟨2028⟩⟨2029⟩⟨202E⟩" in said
    assert not browser.ask(r"/[\0-\x08\x0b-\x1f\u202e\u2028]/.test(document.body.textContent)")


def test_thousands_of_turns_open_at_once_and_stay_few_in_memory(shown, tmp_path):
    browser = shown(endless(tmp_path / "long.jsonl"), address="#turn=2500")
    turned(browser, 2500)
    assert text(browser, "#turns .chosen .asked") == "chunk 2,500"  # in sight at once
    loaded = [address for address in browser.requests if "/data/" in address]
    assert len(loaded) <= 3  # the index, the head and one block of memories
    assert browser.ask("document.querySelectorAll('*').length") < 600
    browser.ask("document.getElementById('turns').focus()")
    browser.press("End", "ArrowUp")
    turned(browser, 4999)
    assert text(browser, "#turns .chosen .asked") == "chunk 4,999"
    assert text(browser, "#detail .text").startswith("turn 4997")
    browser.press("[")
    turned(browser, 4998)


def labels(browser):
    cells = "[...document.querySelectorAll('.crown button')]"
    return browser.ask(cells + ".map((one) => one.getAttribute('aria-label'))")


def test_a_parallel_reading_is_a_tree_that_is_climbed_by_clicks_and_keys(shown, tmp_path):
    browser = shown(parallel(tmp_path / "one.jsonl"))
    assert labels(browser) == [
        "chunk 1: nothing new", "chunk 2: wrote a note, with 1 fact",
        "chunk 3: wrote a note, with 1 fact",
        "level 1, merge 1: wrote a note, with 1 fact; 1 fact lost here",
        "the memory after round 1",
        "chunk 1: nothing new", "chunk 2: nothing new", "chunk 3: nothing new",
        "the memory, as it was before",
    ]  # fmt: skip
    assert texts(browser, ".tree figcaption") == [
        "Round 1: 3 chunks, 2 notes; 1 merge, 1 note, 1 fact lost",
        "Round 2: 3 chunks, 0 notes; the memory stayed as it was",
    ]
    drawn = browser.ask("document.querySelector('.crown path').getAttribute('d').split('M').length")
    assert drawn == 1 + 2 + 1  # two notes to the merge, its own to the memory
    browser.ask("document.querySelectorAll('.crown button')[3].click()")
    turned(browser, 4)
    held = "document.activeElement.getAttribute('aria-label')"
    browser.ask("document.querySelector('.crown [aria-current]').focus()")
    browser.press("ArrowDown")
    assert browser.ask(held).startswith("chunk 2")
    browser.press("ArrowRight", "ArrowRight")  # stops at the last
    assert browser.ask(held).startswith("chunk 3")
    browser.press("Enter")
    turned(browser, 3)
    browser.wait(held + ".startsWith('chunk 3')")  # held, though the page was drawn anew
    browser.press("ArrowUp", "ArrowUp")
    assert browser.ask(held) == "the memory after round 1"
    browser.press("ArrowDown")
    assert browser.ask(held).startswith("level 1")
    stops = "[...document.querySelectorAll('.crown button')].filter((one) => one.tabIndex === 0)"
    assert browser.ask(stops + ".length") == 1


def test_a_serial_reading_has_no_tree(shown, tmp_path):
    browser = shown(training(tmp_path / "one.jsonl"))
    assert browser.ask("document.querySelectorAll('.tree, .crown').length") == 0


def test_thousands_of_chunks_are_a_tree_of_few_cells(shown, tmp_path):
    browser = shown(parallel(tmp_path / "one.jsonl", 2_000))
    first, *_, last = labels(browser)[:100]
    assert first == "chunks 1 to 20: nothing new"
    assert last == "chunks 1,981 to 2,000: 2 of 20 wrote a note, with 2 facts"
    assert browser.ask("document.querySelectorAll('*').length") < 900
    browser.ask("document.querySelectorAll('.crown button')[99].click()")
    turned(browser, 1_999)  # the first that wrote a note


@pytest.mark.parametrize("width", [400, 800, 1400])
def test_it_fits(shown, width, tmp_path):
    long = evaluation(tmp_path / "one.jsonl", question="x" * 500, answer="y" * 500)
    tree = parallel(tmp_path / "tree.jsonl", 2_000)
    made = training(tmp_path / "two.jsonl", groups=2)
    browser = shown(made, long, tree, address="#reading=5&beside")
    browser.resize(width, 900)
    browser.wait(f"innerWidth === {width}")
    assert browser.ask("document.documentElement.scrollWidth") <= width
    browser.ask("location.hash = '#reading=6&turn=1'")
    browser.wait("document.querySelector('.crown')")
    assert browser.ask("document.documentElement.scrollWidth") <= width
    browser.resize(1400, 900)
