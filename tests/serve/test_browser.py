"""The server's pages in a browser, where there is one: worked by keys, cut off, killed, lied to.

The policy is arithmetic (`fake`), or a parrot. After every test nothing went wrong in a page, and
nothing but the server was asked for anything.
"""

import dataclasses
import json
import re

import httpx2
import pytest

from benchmarks import reading_page
from notepad_jax.programs import pages
from notepad_jax.reading.rules import Rules
from notepad_jax.serve.browser import page_cache
from notepad_jax.text.token_blocks import well_formed
from notepad_jax.types import Finish, Piece, tokens
from tests.report.made_traces import HOSTILE, endless, training
from tests.serve.fake import DOCUMENT, NAME, TOKENIZER, Arithmetic, running, served, until
from tests.serve.wire import Wire
from tests.support.chromium import CHROMIUM, Browser

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]
CLIENT = httpx2.Client(timeout=30)
QUESTIONS = ("who is ann ?", "code of bob ?")
NET = re.compile("net::ERR_|status of (401|400|404)")  # what a browser says of replies that we tell


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile"), 1000, 900) as browser:
        yield browser


@pytest.fixture
def browser(opened):
    opened.requests.clear()
    opened.problems.clear()
    opened.open("about:blank")
    yield opened
    assert [one for one in opened.problems if not NET.search(one)] == []
    assert {re.sub(r":\d+/.*", "", one) for one in opened.requests} <= {
        "about:blank", "http://127.0.0.1",
    }  # fmt: skip


def server(pause=0.0, **more):
    return running(served(Arithmetic(pause=pause)), **{"views": pages.views(None)} | more)


def text(browser, selector):
    return browser.ask(f"document.querySelector({json.dumps(selector)})?.innerText")


def home(browser, url, address=""):
    browser.open(f"{url}/{address}")
    browser.wait("document.getElementById('model')?.textContent.includes('reads here')")


def fill(browser, name, value):
    browser.ask(f"document.getElementById('{name}').value = {json.dumps(value)}")


def ask(browser, document=DOCUMENT, *questions):
    fill(browser, "text", document)
    fill(browser, "questions", "\n".join(questions or QUESTIONS))
    browser.ask("document.getElementById('ask').requestSubmit()")


def ended(browser):
    browser.wait("document.getElementById('trace')?.checkVisibility()")
    browser.wait("document.querySelectorAll('progress:not([hidden])').length === 0")


def focused(browser):
    return browser.ask("document.activeElement.id")


def test_all_of_it_by_keys(browser):
    with server(0.01) as url:
        home(browser, url)
        # Ways in: the link, the drop zone, the text, the questions, the button.
        ways = []
        for _ in range(5):
            browser.press("Tab")
            ways.append(focused(browser))
            assert browser.ask("getComputedStyle(document.activeElement).outlineStyle") != "none"
        assert ways == ["", "drop", "text", "questions", "read"]
        browser.press("Enter")
        browser.wait("document.activeElement.id === 'drop'")  # what is missing is said, and shown
        assert "there is no document yet" in text(browser, "#problem")
        browser.press("Tab", *DOCUMENT)
        browser.press("Tab", *QUESTIONS[0], "Enter", *QUESTIONS[1], "Tab", "Enter")
        browser.wait("document.activeElement.id === 'of-reading'")
        assert text(browser, ".course h3") == QUESTIONS[0]
        browser.wait("document.querySelector('.course ins')")
        assert "chunk" in text(browser, ".course .dim")
        browser.wait("document.getElementById('heard').textContent.startsWith('chunk')")
        ended(browser)
        id = browser.ask("location.hash").removeprefix("#reading=")
        card = CLIENT.get(f"{url}/v1/readings/{id}").json()
        shown = browser.ask("[...document.querySelectorAll('.answer q')].map((q) => q.innerText)")
        assert shown == [one["answer"].strip() for one in card["readings"]]
        assert text(browser, "#heard") == "It was read to its end."
        browser.press("Tab", "Enter")  # to the page of its turns
        browser.wait("document.querySelector('#detail .question')")
        assert browser.ask("location.pathname") == f"/traces/{id}/"
        assert browser.ask("document.querySelectorAll('#readings .row').length") == 2
        browser.press("ArrowRight")
        browser.wait("location.hash === '#reading=1&turn=2'")
        browser.ask("history.back()")
        browser.wait("document.querySelectorAll('.answer q').length === 2")  # as it was


def test_it_names_the_policy_that_reads_here(browser):
    policy = served(Arithmetic())
    policy = dataclasses.replace(policy, beside=(dataclasses.replace(policy, name="other"),))
    with running(policy, views=pages.views(None)) as url:
        home(browser, url)
        assert text(browser, "#model") == f"{NAME}:notepad reads here."


def test_a_file_is_dropped_or_chosen_and_refusals_are_in_the_servers_words(browser, tmp_path):
    with server() as url:
        home(browser, url)

        def drop(name, content, more=""):
            browser.ask(
                "(() => { const all = new DataTransfer();"
                f"all.items.add(new File([{content}], {json.dumps(name)})); {more}"
                "document.body.dispatchEvent(new DragEvent('drop', { dataTransfer: all, "
                "bubbles: true, cancelable: true })); })()"
            )

        def said(question):
            fill(browser, "questions", question)
            browser.ask("document.getElementById('ask').requestSubmit()")
            browser.wait("!document.getElementById('read').disabled")
            browser.wait("!document.getElementById('problem').hidden")
            return text(browser, "#problem")

        drop("two", "'a'", "all.items.add(new File(['b'], 'other'));")
        assert "one file at a time" in text(browser, "#problem")
        drop('a\u202eb/c"\n.bin', "new Uint8Array([104, 0, 7])")
        assert text(browser, "#drop").startswith("a⟨202E⟩b")
        assert "it is binary: byte 1 is zero" in said("who ?")
        drop("book.txt", json.dumps(DOCUMENT))
        assert "the question has" in said("who is ann ? " * 9)
        until(lambda: len(CLIENT.get(f"{url}/v1/files").json()["data"]) == 1)  # not the binary one
        fill(browser, "questions", "who is ann ?")
        browser.ask("document.getElementById('ask').requestSubmit()")
        ended(browser)
        assert len(CLIENT.get(f"{url}/v1/files").json()["data"]) == 1  # and sent once
        browser.ask("document.getElementById('another').click()")
        (tmp_path / "empty.txt").write_text("")
        node = browser.call("DOM.getDocument")["root"]["nodeId"]
        node = browser.call("DOM.querySelector", nodeId=node, selector="#file")["nodeId"]
        browser.call("DOM.setFileInputFiles", nodeId=node, files=[str(tmp_path / "empty.txt")])
        browser.wait("document.getElementById('drop').textContent.startsWith('empty.txt, 0')")
        fill(browser, "questions", "who is ann ?")
        browser.ask("document.getElementById('ask').requestSubmit()")
        ended(browser)
        assert "chunk 0 of 0" in text(browser, ".course .dim")
        listed = CLIENT.get(f"{url}/traces").text
        assert "book.txt" in listed and "empty.txt" in listed
        browser.open(f"{url}/#reading=reading_nothing")
        browser.wait("document.getElementById('problem')?.textContent.includes('no reading')")


def test_it_is_loaded_again_and_stopped(browser):
    with server(0.03) as url:
        home(browser, url)
        ask(browser, DOCUMENT * 20)
        browser.wait("document.querySelectorAll('.course ins').length === 2")
        address = browser.ask("location.hash")
        home(browser, url, "?again" + address)
        browser.wait("document.querySelectorAll('.course').length === 2")
        browser.wait("/chunk [1-9]/.test(document.querySelector('.course .dim').textContent)")
        browser.wait("document.querySelector('.course ins')")
        browser.ask("document.getElementById('stop').focus()")
        browser.press("Enter")
        ended(browser)
        assert text(browser, "#state") == "It was stopped."
        assert "not read to its end" in text(browser, ".course .dim")
        (card,) = CLIENT.get(f"{url}/v1/readings").json()["data"]
        assert card["status"] == "cancelled"


def test_a_connection_that_breaks_is_made_again_and_nothing_is_missed(browser):
    with server(0.03) as url:
        wire = Wire(int(url.rpartition(":")[2]))
        try:
            home(browser, wire.url)
            ask(browser, DOCUMENT * 5)
            browser.wait("document.querySelectorAll('.course ins').length === 2")
            wire.open = False
            wire.cut()
            browser.wait("document.getElementById('state').textContent.includes('trying again')")
            wire.open = True
            browser.wait("document.getElementById('state').textContent.includes('Under way')")
            wire.cut()
            ended(browser)
            (card,) = CLIENT.get(f"{url}/v1/readings").json()["data"]
            card = CLIENT.get(f"{url}/v1/readings/{card['id']}").json()
            shown = browser.ask(
                "[...document.querySelectorAll('.answer q')].map((q) => q.innerText)"
            )
            said = [one["answer"].strip() for one in card["readings"]]  # of no seed: may be empty
            assert shown == [answer or "(nothing)" for answer in said]
            chunks = browser.ask("document.querySelector('.course .dim').innerText")
            assert f"chunk {card['readings'][0]['of']} of " in chunks
        finally:
            wire.close()


def test_a_server_that_comes_back_goes_on_under_the_same_page(browser, tmp_path):
    with server(0.03, folder=tmp_path) as url:
        home(browser, url)
        ask(browser, DOCUMENT * 8)
        browser.wait("document.querySelectorAll('.course ins').length === 2")
    browser.wait("document.getElementById('state').textContent.includes('trying again')")
    with server(folder=tmp_path, port=int(url.rpartition(":")[2])):
        ended(browser)
        assert text(browser, "#state") == "It was read to its end."
        browser.ask("document.getElementById('another').click()")
        browser.wait("document.getElementById('ask').checkVisibility()")
    ask(browser, DOCUMENT * 8)
    browser.wait("document.getElementById('problem').textContent.includes('is it still running')")
    with server(0.05, port=int(url.rpartition(":")[2])) as again:
        assert again == url
        ask(browser, DOCUMENT * 8)  # which the page believes to be there
        browser.wait("document.getElementById('stop').checkVisibility()")
    with server(port=int(url.rpartition(":")[2])):  # which knows nothing of it
        browser.wait("document.getElementById('problem').textContent.includes('no reading')")
        assert not browser.ask("document.getElementById('stop').checkVisibility()")
        assert text(browser, "#state") == ""


def test_the_key_is_asked_for_kept_for_the_tab_and_opens_the_traces(browser, tmp_path):
    training(tmp_path / "mine" / "trajectories.jsonl")
    with server(key="secret-1", views=pages.views(str(tmp_path))) as url:
        browser.open(f"{url}/")
        browser.wait("document.getElementById('door')?.open")
        browser.press("Escape")
        browser.wait("document.getElementById('problem').textContent.includes('is missing')")
        browser.ask("location.reload()")
        browser.wait("document.getElementById('door')?.open")
        browser.press(*"wrong", "Enter")
        browser.wait("!document.getElementById('refused').hidden")
        assert "the API key is wrong" in text(browser, "#refused")
        browser.press(*"secret-1", "Enter")
        browser.wait("document.getElementById('model').textContent")
        ask(browser)
        ended(browser)
        browser.ask("document.getElementById('trace').click()")
        browser.wait("document.querySelector('#detail .question')")
        browser.open(f"{url}/")  # the tab knows the key
        browser.wait("document.getElementById('model')?.textContent")
        assert browser.ask("document.cookie") == "" and "secret" not in browser.ask("location.href")
        browser.call("Network.clearBrowserCookies")
        browser.open(f"{url}/traces/mine/#reading=2&turn=3")
        browser.wait("document.getElementById('key')?.form.method === 'post'")
        browser.wait("document.activeElement.id === 'key'")  # once the page is drawn
        browser.press(*"secret-1", "Enter")
        browser.wait("document.querySelector('#detail .top .dim')?.innerText.startsWith('turn 3 ')")
        assert browser.ask("location.hash") == "#reading=2&turn=3"


class Parrot(Arithmetic):
    """Says a text, whatever it is asked."""

    async def stream(self, prompt, sampling):
        ids = TOKENIZER.encode(well_formed(HOSTILE)).tolist() + [sampling.stop_ids[0]]
        ids[0:0] = TOKENIZER.encode("ann " * (len(prompt.tokens) % 3)).tolist()
        yield Piece(tokens(ids), -tokens(ids).astype("f4") / 999, Finish.STOP, 7, (), 0)


def test_nothing_that_was_read_or_said_breaks_a_page(browser):
    rules = Rules(max_question=400, chunk_size=40, max_memory=400, max_answer=400,
                  memory_update="overwrite")  # fmt: skip
    policy = served(Parrot(), rules=rules, max_prompt=2000, max_completion=400)
    question = well_formed(HOSTILE).replace("\n", " ")
    with running(policy, views=pages.views(None)) as url:
        home(browser, url)
        ask(browser, well_formed(HOSTILE).replace("\0", "") * 5, question)
        ended(browser)
        for place in ("reading", "trace", "list"):
            if place == "trace":
                browser.ask("document.getElementById('trace').click()")
                browser.wait("document.querySelector('#detail .question')")
                browser.press("[", "]", "ArrowRight")
                browser.wait("document.querySelector('#detail .text')")
            elif place == "list":
                browser.open(f"{url}/traces")
                browser.wait("document.querySelector('.rows')")
            assert browser.ask("document.title") != "broken"
            assert browser.ask("document.querySelectorAll('img, main script').length") == 0
            assert "<script>" in browser.ask("document.body.innerText")
            unseen = r"/.{0,30}[\0-\x08\x0b-\x1f\u202e\u2028].{0,9}/"
            assert browser.ask(f"document.body.innerText.match({unseen})") is None


def test_runs_of_thousands_of_turns_are_made_and_then_open_at_once(browser, tmp_path, monkeypatch):
    endless(tmp_path / "long" / "readings.jsonl")
    monkeypatch.setattr(page_cache, "PATIENCE", 0.2)
    with server(views=pages.views(str(tmp_path))) as url:
        browser.open(f"{url}/traces/long/#turn=2500")
        browser.wait("document.querySelector('.lead')?.textContent.includes('opens by itself')")
        browser.wait(
            "document.querySelector('#detail .top .dim')?.innerText.startsWith('turn 2,500')"
        )
        loaded = [address for address in browser.requests if "/data-" in address]
        assert len(loaded) <= 3


def test_the_benchmark_reads_and_makes_a_picture(tmp_path):
    rules = Rules(max_question=99, chunk_size=99, max_memory=9, max_answer=9,
                  memory_update="overwrite")  # fmt: skip
    policy = served(Arithmetic(), rules=rules, max_prompt=2000)
    with running(policy, views=pages.views(None)) as url:
        told = reading_page.measured(f"{url}/", 200, 0, tmp_path / "page.png")
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")
    assert told["requests_elsewhere"] == 0 < told["memories_shown_seconds"]


@pytest.mark.parametrize("width, dark", [(390, False), (390, True), (1000, True)])
def test_it_fits_in_both_schemes(browser, width, dark):
    with server() as url:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        browser.call("Emulation.setEmulatedMedia", features=[scheme])
        browser.resize(width, 800)
        try:
            home(browser, url)
            fits = "document.documentElement.scrollWidth <= innerWidth"
            assert browser.ask(fits)
            ask(browser, "x" * 4000, "y" * 40)
            browser.wait("document.getElementById('read').disabled === false")
            ask(browser)
            ended(browser)
            assert browser.ask(fits)
            paper = browser.ask("getComputedStyle(document.body).backgroundColor")
            assert paper == ("rgb(20, 23, 27)" if dark else "rgb(255, 255, 255)")
            for path in ("/traces", "/traces/nothing/"):
                browser.open(url + path)
                browser.wait("document.querySelector('.lead')")
                assert browser.ask(fits)
        finally:
            browser.resize(1000, 900)
            browser.call("Emulation.setEmulatedMedia", features=[])
