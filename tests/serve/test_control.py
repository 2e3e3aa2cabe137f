"""What trainers do to a server: pause it, give turns up, change weights, generate from ids."""

import asyncio
import json
import threading

import httpx2
import numpy as np
import pytest

from notepad_jax.serve.completions.control import Gate
from notepad_jax.types import Finish, Prompt, SamplingParams, tokens
from tests.serve.fake import NAME, TOKENIZER, Arithmetic, running, served, until

WORDS = "the secret code of ann is red"
IDS = TOKENIZER.encode(WORDS).tolist()
CLIENT = httpx2.Client(timeout=30)
TEXT = {"model": NAME, "prompt": WORDS, "max_tokens": 5, "seed": 1}


class Weights:
    """What was asked for; "bad" is not adopted."""

    def __init__(self):
        self.version = 7

    async def adopted(self, folder, version):
        if folder == "bad":
            raise ValueError("the checksum of layers.q is another")
        self.version = self.version + 1 if version is None else version


def trained(streamer, **options):
    weights = Weights()
    policy = served(streamer, version=lambda: weights.version)
    return running(policy, trainers=weights.adopted, **options)


def post(url, path, **body):
    return CLIENT.post(url + path, json=body)


def test_a_generation_has_ids_in_and_ids_out():
    with trained(Arithmetic()) as url:
        how = {"max_new_tokens": 4, "sampling_seed": 3, "temperature": 1.0, "top_k": -1}
        one = post(url, "/generate", input_ids=IDS, sampling_params=how, return_logprob=True).json()
        plain = post(url, "/v1/completions", **TEXT | {"seed": 3, "max_tokens": 4},
                     return_token_ids=True).json()["choices"][0]  # fmt: skip
        assert one["output_ids"] == plain["token_ids"] and one["text"] == plain["text"]
        about = one["meta_info"]
        assert [i for _, i, _ in about["output_token_logprobs"]] == one["output_ids"]
        assert [p for p, _, _ in about["output_token_logprobs"]] == [-1 / 8, -2 / 8, -3 / 8, -0.5]
        assert about["finish_reason"] == {"type": "length", "length": 4}
        assert about["prompt_tokens"] == 7 and about["weight_version"] == "7"
        none = {"top_logprobs_num": 0, "return_text_in_logprobs": False, "logprob_start_len": -1}
        several = post(url, "/generate", input_ids=[IDS, IDS[:2]], sampling_params=how | {"n": 2},
                       stream=None, **none)  # fmt: skip
        assert len(several.json()) == 4
        for bad, param in (
            ({"input_ids": IDS, "sampling_params": {"top_k": 5}}, "sampling_params.top_k"),
            ({"input_ids": IDS, "stream": True}, "stream"), ({"text": "a", "lora": 1}, "lora"),
            ({"text": "a", "input_ids": IDS}, "input_ids"), ({}, "input_ids"),
            ({"input_ids": IDS, "sampling_params": 3}, "sampling_params"),
            ({"input_ids": IDS, "\ud800": 1}, "\\ud800"),
            ({"input_ids": IDS, "top_logprobs_num": 3}, "top_logprobs_num"),
            ({"input_ids": IDS, "return_text_in_logprobs": True}, "return_text_in_logprobs"),
            ({"input_ids": IDS, "logprob_start_len": 0}, "logprob_start_len"),
        ):  # fmt: skip
            reply = CLIENT.post(url + "/generate", content=json.dumps(bad))
            assert reply.status_code == 400 and reply.json()["error"]["param"] == param


def test_while_it_is_paused_requests_wait_and_other_weights_come():
    streamer = Arithmetic(pause=0.05)
    with trained(streamer) as url:
        found = []
        asks = lambda: found.append(post(url, "/v1/completions", **TEXT).json())  # noqa: E731
        first = threading.Thread(target=asks)
        first.start()
        until(lambda: streamer.running)
        assert post(url, "/pause").json() == {"status": "paused"}
        assert streamer.running == 0  # it ended
        first.join(30)
        assert found[0]["choices"][0]["finish_reason"] == "length"
        second = threading.Thread(target=asks)
        second.start()
        until(lambda: streamer.seats)
        assert CLIENT.get(url + "/is_paused").json() == {"is_paused": True}
        bad = post(url, "/update_weights", folder="bad")
        assert bad.status_code == 400 and "checksum" in bad.json()["error"]["message"]
        assert post(url, "/update_weights", folder="good").json()["policy_version"] == 8
        assert post(url, "/update_weights", folder="x", version=True).status_code == 400
        assert streamer.running == 0 and len(found) == 1
        post(url, "/resume")
        second.join(30)
        assert found[1]["choices"][0]["text"] == found[0]["choices"][0]["text"]
        assert CLIENT.get(url + "/weight_info").json()["policy_version"] == 8
        assert post(url, "/pause?mode=now").status_code == 400


@pytest.mark.parametrize("model", [NAME, f"{NAME}:notepad"])
def test_turns_that_are_given_up_say_so(model):
    streamer = Arithmetic(pause=0.3)
    with trained(streamer) as url:
        found = []
        parts = [{"type": "text", "text": text} for text in (WORDS, "who")]
        chat = {"model": model, "messages": [{"role": "user", "content": parts}]}
        asking = threading.Thread(
            target=lambda: found.append(post(url, "/v1/chat/completions", **chat).json())
        )
        asking.start()
        until(lambda: streamer.running)
        post(url, "/pause?mode=abort")
        asking.join(30)
        assert found[0]["choices"][0]["finish_reason"] == "abort"
        assert streamer.running == streamer.seats == 0
        post(url, "/resume")
        assert post(url, "/v1/completions", **TEXT).status_code == 200


def test_trainers_have_a_key_of_their_own():
    with trained(Arithmetic(), key="clients", control_key="trainers") as url:
        codes = {
            (path, key): CLIENT.get(url + path, headers={"Authorization": f"Bearer {key}"})
            for path in ("/is_paused", "/%69s_paused", "/version")
            for key in ("clients", "trainers")
        }
        assert {k: reply.status_code for k, reply in codes.items()} == {
            ("/is_paused", "clients"): 401, ("/is_paused", "trainers"): 200,
            ("/%69s_paused", "clients"): 401, ("/%69s_paused", "trainers"): 200,
            ("/version", "clients"): 200, ("/version", "trainers"): 401,
        }  # fmt: skip


def test_without_being_told_so_a_server_serves_no_trainers():
    with running(served(Arithmetic())) as url:
        assert post(url, "/pause").status_code == 404
        assert post(url, "/generate", input_ids=IDS).status_code == 404


def test_whoever_leaves_while_the_gate_is_closed_is_forgotten():
    async def go():
        streamer, gate = Arithmetic(), Gate(None)
        sampling = SamplingParams(1.0, 1.0, 4, (2,), 0)
        with gate.seat(streamer.seat) as seat:
            await gate.pause(abort=True)
            waiting = asyncio.ensure_future(seat.complete(Prompt(tokens(), tokens(IDS)), sampling))
            await asyncio.sleep(0.01)
            assert not streamer.asked
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            gate.resume()
            done = await seat.complete(Prompt(tokens(), tokens(IDS)), sampling)
        return done, gate.running

    done, left = asyncio.run(go())
    assert done.finish is Finish.LENGTH and left == 0
    np.testing.assert_array_equal(done.tokens, IDS[:4])


def test_who_resumes_ends_a_pause_and_nobody_who_comes_then_is_given_up():
    async def go():
        streamer, gate = Arithmetic(pause=0.02), Gate(None)
        sampling, prompt = SamplingParams(1.0, 1.0, 8, (2,), 0), Prompt(tokens(), tokens(IDS * 4))
        found = []
        for abort in (False, True):
            with gate.seat(streamer.seat) as seat:
                long = asyncio.ensure_future(seat.complete(prompt, sampling))
                await asyncio.sleep(0.01)
                pausing = asyncio.ensure_future(gate.pause(abort))
                await asyncio.sleep(0)
                gate.resume()
                late = asyncio.ensure_future(seat.complete(prompt, sampling))
                found.append((await pausing, (await long).finish, (await late).finish))
        return found

    waited, given_up = asyncio.run(asyncio.wait_for(go(), 20))
    assert waited == (False, Finish.LENGTH, Finish.LENGTH)
    assert given_up == (False, Finish.CANCELLED, Finish.LENGTH)
