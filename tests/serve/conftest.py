"""One server of our engine for all tests that need a real one: starting it costs the most."""

import pytest

from tests import chat_models
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
