"""The servers of tests: one of our engine for all that need a real one, whose start costs the most,
and one that is arithmetic for each file that has no other `url`."""

import pytest

from tests import chat_models
from tests.serve.fake import Arithmetic, running, served
from tests.serve.program import program


@pytest.fixture(scope="session")
def chats(tmp_path_factory):
    """A chat model of random weights, served by the program, and its folder."""
    folder = tmp_path_factory.mktemp("served")
    policy = chat_models.folder(folder / "chats")
    sizes = ("--config.serve.max_completion=24", "--config.serve.queue=20",
             "--config.serve.max_prompt=900")  # fmt: skip
    how = ("--config", "chat", "--served-name", "chats", "--rl")
    with program(policy, folder, *how, *sizes) as url:
        yield url, policy


@pytest.fixture(scope="module")
def streamer():
    return Arithmetic()


@pytest.fixture(scope="module")
def url(streamer):
    with running(served(streamer)) as there:
        yield there
