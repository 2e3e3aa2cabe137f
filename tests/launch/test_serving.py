"""What keeps a server running: the image and the unit say nothing that is not so, and their
commands serve. No image is built here, and no unit is started."""

import configparser
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import httpx2
import pytest

from tests.launch.conftest import LAUNCH, ROOT
from tests.serve.fake import until

KEY = "secret-1"
INSTRUCTIONS = {"FROM", "ARG", "WORKDIR", "COPY", "RUN", "USER", "ENV", "VOLUME", "EXPOSE",
                "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT"}  # fmt: skip


def image() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile, continued lines joined."""
    text = (LAUNCH / "Dockerfile").read_text()
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    return [tuple(line.split(" ", 1)) for line in text.splitlines() if line.strip()]


def of(name: str) -> list[str]:
    return [said.strip() for one, said in image() if one == name]


def unit(text: str | None = None) -> configparser.RawConfigParser:
    found = configparser.RawConfigParser(strict=True)
    found.optionxform = str
    found.read_string((LAUNCH / "notepad-jax.service").read_text() if text is None else text)
    return found


def test_an_image_has_what_a_wheel_is_made_of():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert {name for name, _ in image()} == INSTRUCTIONS
    copied = {source for line in of("COPY") for source in line.split()[:-1]}
    assert all((ROOT / source).exists() for source in copied)
    packages = project["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {name.rstrip("*") for name in packages} <= copied
    named = [project["project"]["readme"], *project["project"]["license-files"]]
    assert {*named, "pyproject.toml", "constraints.txt"} <= copied
    starter = ROOT / "notepad_jax" / "starter" / "policy"  # a link, which must lead somewhere
    assert str(starter.resolve().relative_to(ROOT)) in copied
    sent = (LAUNCH / "Dockerfile.dockerignore").read_text().split("\n*\n", 1)[1].split()
    assert {line[1:] for line in sent if line.startswith("!")} == copied
    extras = of("ARG")[0].partition("=")[2].split(",")
    assert {*extras} <= {*project["project"]["optional-dependencies"]}
    for run in of("RUN"):
        subprocess.run(["bash", "-n", "-c", run], check=True, timeout=30)
    for words in (*of("ENTRYPOINT"), of("HEALTHCHECK")[0].partition("CMD ")[2]):
        assert all(isinstance(word, str) for word in json.loads(words))


def test_the_unit_is_one_that_systemd_takes(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd here")
    text = (LAUNCH / "notepad-jax.service").read_text()
    here = text.replace("/opt/notepad-jax/bin/notepad-jax", shutil.which("true"))
    copy = tmp_path / "notepad-jax.service"
    copy.write_text(here)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    mine = [line for line in done.stderr.splitlines() if "notepad-jax.service" in line]
    assert mine == [], done.stderr


def served(words: list[str], folder: Path, key: str, port: str) -> int:
    """Runs a command as the image or the unit would, until it serves; returns how it ended."""
    words = [sys.executable, "-m", "notepad_jax", *words[1:], "--config.serve.warm_up=False"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu",
                                "NOTEPAD_API_KEY": key}  # fmt: skip
    said = folder / "said"
    with said.open("w") as out:
        running = subprocess.Popen(words, env=environment, stdout=out, stderr=out, cwd=folder)
    try:
        until(lambda: "/v1 (" in said.read_text() or running.poll() is not None, 200)
        assert running.poll() is None, said.read_text()
        url = f"http://127.0.0.1:{port}"
        assert httpx2.get(f"{url}/health", timeout=30).status_code == 200
        assert httpx2.get(f"{url}/v1/models", timeout=30).status_code == 401
        known = {"Authorization": f"Bearer {key}"}
        assert httpx2.get(f"{url}/v1/models", headers=known, timeout=30).status_code == 200
        running.send_signal(signal.SIGTERM)
        return running.wait(60)
    finally:
        running.kill()
        running.wait(60)


@pytest.mark.slow
def test_the_commands_of_image_and_unit_serve_and_end_when_they_are_told_to(tmp_path):
    starter, port = str(ROOT / "data" / "starter"), "8493"
    (words,) = map(json.loads, of("ENTRYPOINT"))
    words = [word.replace("/data", str(tmp_path)) for word in words]
    words[words.index("8000")] = port
    ended = served([*words, "--policy", starter], tmp_path, KEY, port)
    service = unit()["Service"]
    line = service["ExecStart"].replace("%S", str(tmp_path))
    for name, value in {"POLICY": starter, "HOST": "127.0.0.1", "PORT": port}.items():
        line = line.replace(f"${{{name}}}", value)
    assert "$" not in line and "%" not in line
    assert served(shlex.split(line), tmp_path, KEY, port) == ended
    assert str(ended) in service["SuccessExitStatus"].split()
    assert (tmp_path / "files").exists() and (tmp_path / "notepad-jax" / "files").exists()
