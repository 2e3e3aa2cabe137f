"""Both pages in a browser, where there is one: the script runs under the page's own policy, and
nothing is too small or too wide on a phone.

The pages are put into a frame of a phone's width, because a window has a least width of its own.
"""

import html
import json
import re
import shutil
import subprocess

import pytest

from notepad_jax.report import evaluation_page, quickstart_page
from tests.report.test_evaluation_page import LENGTHS, METHODS, example, full, summary
from tests.report.test_quickstart_page import full_report, read

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
QUIET = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         "--allow-file-access-from-files", "--virtual-time-budget=3000", "--dump-dom")  # fmt: skip
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]
FRAME = """<iframe src="{page}" style="width:{width}px;height:800px;border:0"></iframe><pre></pre>
<script>
document.querySelector("iframe").onload = (event) => {{
  const page = event.target.contentDocument;
  const seen = (one) => one.getBoundingClientRect().width > 0;
  const scale = (svg) => svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
  const letters = [...page.querySelectorAll("svg text")].filter(seen).map((text) =>
    parseFloat(page.defaultView.getComputedStyle(text).fontSize) * scale(text.ownerSVGElement));
  const svg = [...page.querySelectorAll("figure svg")].find(seen);
  const box = svg.getBoundingClientRect();
  svg.dispatchEvent(new page.defaultView.PointerEvent("pointermove", {{ clientX: box.right }}));
  const form = page.querySelector("form.filter"), all = form.querySelector("output").textContent;
  form.elements.words.value = "no such words";
  form.dispatchEvent(new page.defaultView.Event("input"));
  document.querySelector("pre").textContent = JSON.stringify([
    page.documentElement.scrollWidth, Math.min(...letters), svg.parentNode.querySelector(".tip")
      .textContent, form.hidden, all, form.querySelector("output").textContent]);
}};
</script>
"""


def looked_at(page, tmp_path, width: int) -> list:
    """Returns what a browser made of a page: [width, least letters, the pointer's words, ...]."""
    frame = tmp_path / "frame.html"
    frame.write_text(FRAME.format(page=page.name, width=width))
    done = subprocess.run(
        [CHROMIUM, *QUIET, f"--user-data-dir={tmp_path / 'profile'}", f"file://{frame}"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    (told,) = re.findall(r"<pre>(.*?)</pre>", done.stdout, re.DOTALL)
    return json.loads(html.unescape(told))


def quickstart(folder):
    shown = [read(3, number=k, who=who) for k in range(3) for who in ("before RL", "after RL")]
    return quickstart_page.write(folder, full_report(examples=shown))


def evaluation(folder):
    by_length = [summary(m, n, 30 + 5 * k) for k, m in enumerate(METHODS[:3]) for n in LENGTHS]
    return evaluation_page.write(folder, full(by_length=by_length, examples=[example()]))


@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.parametrize("write, told, readings", [
    (quickstart, "3.5M tokensafter RL 98.4%", 3), (evaluation, "3.5M tokensnotepad 46.9%", 1),
])  # fmt: skip
def test_a_page_works_and_fits(write, told, readings, width, tmp_path):
    wide, letters, tip, hidden, all_shown, none_shown = looked_at(write(tmp_path), tmp_path, width)
    assert wide <= width and letters >= 9
    assert tip.startswith(told)
    assert not hidden and (all_shown, none_shown) == (
        f"{readings} of {readings}", f"0 of {readings}",
    )  # fmt: skip
