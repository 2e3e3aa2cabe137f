"""What several files of this folder compare with."""

import pytest

from tests.runs import run


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory):
    """A small run from its beginning to its end; nobody writes into its folder."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(folder)
    return folder
