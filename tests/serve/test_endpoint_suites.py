"""The suites that nobody's files are needed for, asked of an endpoint that is arithmetic."""

import json

import pytest

from notepad_jax import cli
from tests.serve.fake import NAME, Arithmetic, running, served

SUITES = {"babilong": "qa1,qa8", "graphwalks": "", "mrcr": "", "oolong": "", "nolima": ""}


@pytest.fixture(scope="module")
def url():
    with running(served(Arithmetic(), max_prompt=30_000), waiting=64) as there:
        yield there


@pytest.mark.parametrize("suite", SUITES)
def test_a_suite_is_read_through_an_endpoint(suite, url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--endpoint", f"{url}/v1", "--model", NAME, "--suite", suite, "--lengths", "2k"]
    words += ["--samples", "1", "--name", "there"]
    short = {"max_question": 999, "max_answer": 8, "max_memory": 8}
    words += [f"--tasks={SUITES[suite]}"] * bool(SUITES[suite])
    words += [f"--config.reading.{name}={value}" for name, value in short.items()]
    assert cli.main(["eval", *words, "--config.evaluate.chunk_size=1024"]) == 0
    report = json.loads((tmp_path / "runs" / "there" / "report.json").read_text())
    (total,) = report["by_length"]
    assert total["questions"] == total["n"] > 0 and not total["unanswered"]
    assert report["suite"] == suite
