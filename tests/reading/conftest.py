"""No proxy and no key of this machine gets into a test."""

import pytest


@pytest.fixture(autouse=True)
def no_proxies_and_no_keys(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "openai_api_key"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
