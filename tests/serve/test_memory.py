"""How much memory a large file costs the server: a process of its own, which measures itself."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from tests.serve.fake import Arithmetic, running, served

ROOT = Path(__file__).parents[2]
MB = 1 << 20


def grown(megabytes: int, how: str) -> int:
    """MB by which the peak memory of a server grows while it takes a file of so many."""
    done = subprocess.run(
        [sys.executable, __file__, str(megabytes), how], capture_output=True, text=True,
        timeout=240, cwd=ROOT, env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tests"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.parametrize("how", ["put", "form"])
def test_20_mb_cost_next_to_nothing(how):
    assert grown(20, how) < 10


@pytest.mark.slow
@pytest.mark.parametrize("how", ["put", "form"])
def test_1_gb_is_taken_by_a_server_under_200_mb_more(how):
    assert grown(1024, how) < 100


def main(megabytes: int, how: str) -> None:
    def peak() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10

    def blocks(count: int):
        for _ in range(count):
            yield b"the secret code of ann is red .\n" * (MB // 32)

    def form(count: int):
        yield b"--b\r\nContent-Disposition: form-data; name=purpose\r\n\r\nuser_data\r\n"
        yield b"--b\r\nContent-Disposition: form-data; name=file; filename=b\r\n\r\n"
        yield from blocks(count)
        yield b"\r\n--b--\r\n"

    with running(served(Arithmetic())) as url, httpx2.Client(timeout=200) as client:

        def send(count: int) -> None:
            if how == "put":
                reply = client.put(f"{url}/v1/files/book", content=blocks(count))
            else:
                kind = {"Content-Type": "multipart/form-data; boundary=b"}
                reply = client.post(f"{url}/v1/files", content=form(count), headers=kind)
            assert reply.json()["bytes"] == count * MB, reply.text

        send(2)  # what is only made once
        before = peak()
        send(megabytes)
        print(peak() - before)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
