"""A model by its id, from a server that speaks as the Hub does, and without it."""

import hashlib
import http.server
import json
import threading
from pathlib import Path

import pytest
from huggingface_hub import constants

from notepad_jax.checkpoint.hf import hub
from notepad_jax.setup import policies

STARTER = Path(__file__).parents[3] / "data" / "starter"
COMMIT = "c0ffee" + "0" * 34
HERE = ("README.md", "config.json", "model.safetensors", "tokenizer.model")
TWICE = ("consolidated.safetensors", "checkpoint-5/model.safetensors")  # the same weights again


def stored(name):
    return "model.safetensors" if name in TWICE else name


def size(name):
    return (STARTER / stored(name)).stat().st_size


class Hub(http.server.BaseHTTPRequestHandler):
    """One model, me/starter: what is asked of the Hub to download it, and nothing else."""

    def do_GET(self):
        base, name = "/api/models/me/starter/", self.path.rpartition("/")[2]
        if self.path == f"{base}revision/main":
            self.answer(json.dumps({"id": "me/starter", "sha": COMMIT, "siblings": []}).encode())
        elif self.path.startswith(f"{base}tree/"):
            files = [
                {"type": "file", "path": n, "size": size(n), "oid": "0" * 40}
                for n in (*HERE, *TWICE)
            ]
            self.answer(json.dumps(files).encode())
        elif self.path.startswith(f"/me/starter/resolve/{COMMIT}/") and name in (*HERE, *TWICE):
            self.server.sent.append((self.command, name))
            self.answer((STARTER / stored(name)).read_bytes())
        else:
            self.answer(b"{}", 404, {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def answer(self, body, status=200, headers=None):
        self.send_response(status)
        told = {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": COMMIT}
        for key, value in (told | (headers or {})).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *words):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hub.fetched.cache_clear()
    serving = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    serving.sent = []
    threading.Thread(target=serving.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{serving.server_port}"
    files = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield serving
    serving.shutdown()
    serving.server_close()
    hub.fetched.cache_clear()


def test_a_model_is_fetched_once_and_is_there_without_the_hub(server):
    folder = Path(policies.resolved("me/starter").home)
    wanted = [name for name in HERE if name != "README.md"]
    for name in wanted:
        assert (folder / name).read_bytes() == (STARTER / name).read_bytes()
    assert sorted(name for command, name in server.sent if command == "GET") == wanted
    assert not any((folder / name).exists() for name in TWICE)
    server.shutdown()
    server.server_close()
    hub.fetched.cache_clear()  # as another process
    assert policies.resolved("me/starter").home == str(folder)


def test_what_the_hub_does_not_have_is_one_line_with_the_mend(server):
    with pytest.raises(ValueError, match=r"as a model of the Hub .* 404.* hf download me/nothing"):
        policies.resolved("me/nothing")
    server.shutdown()
    server.server_close()
    hub.fetched.cache_clear()
    with pytest.raises(ValueError, match=r"--local-dir policies/starter") as told:
        policies.resolved("me/starter")
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("name", ["runs/mine", "mine/typo", "./model", "a/b/c", "one", "gs://a/b"])
def test_a_folder_is_never_asked_of_the_hub(name, server):
    Path("mine").mkdir()
    assert not hub.is_id(name)
