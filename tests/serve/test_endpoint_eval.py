"""`notepad-jax eval --endpoint` against our own server reads what `eval --policy` reads.

Between the two lies text: what the agent decodes the server encodes anew, in its own chat template.
So they are equal where that comes back as the same tokens, and here it does: the documents are
words without marks, which a byte-level tokenizer would join with a line break that follows them,
and the policy, of random weights, can say nothing but whole words. The rest is what must be equal:
the prompts, the sampling, the chunks, the agent, the scores.
"""

import dataclasses
import json

import jax
import pytest

from notepad_jax import cli
from notepad_jax.checkpoint.hf import huggingface
from notepad_jax.text.tokenizer import open_tokenizer
from tests import chat_models, tiny, tiny_bpe
from tests.serve.program import SIZES, program
from tests.text.test_chat import CHATML

pytestmark = pytest.mark.slow

UNTIED = dataclasses.replace(chat_models.QWEN2, tied_embeddings=False)
FLOATS = ("--config.dtype=float32", "--config.engine.cache_dtype=float32")
SAME = ("--config", "ruler", "--suite", "rows.jsonl", "--repeats", "1", "--samples", "12",
        "--config.evaluate.temperature=0", "--json", *FLOATS)  # fmt: skip


def folder(path):
    """A chat model that says whole words, each with the space before it, and ends its turn."""
    words = tiny_bpe.folder(path.with_name("words"), "qwen", chat_template=CHATML)
    tokenizer = open_tokenizer(words)
    pieces = [tokenizer.decode([i]) for i in range(tokenizer.vocab_size)]
    whole = [i for i, text in enumerate(pieces) if text[:1] == " " and text[1:].isalpha()]
    said = [i for i in whole if pieces[i].isascii()] + [tokenizer.control_id("<|im_end|>")]
    params = tiny.params(3, UNTIED)
    other = ~jax.numpy.isin(jax.numpy.arange(UNTIED.vocab_size), jax.numpy.array(said))
    # What is never said has the logit 0, and of forty others some are above it.
    params["unembed"] = jax.numpy.where(other, 0.0, params["unembed"]).at[:, said[-1]].mul(1.5)
    beside = {file.name: file.read_bytes() for file in words.iterdir()}
    return huggingface.export_params(UNTIED, params, path, beside)


def rows(path) -> None:
    """Twelve documents of 3 to 8 chunks; that an answer has some word is right."""
    with path.open("w") as file:
        for number in range(12):
            words = ["bob", "reads", "nothing", "secret", "memory", "blue", "ann", "system"]
            turned = words[number % 8 :] + words[: number % 8]
            gold = ("return", "blue", "caf", "re")[number % 4]
            row = {"question": f"the code of {words[number % 8]}", "answers": [gold],
                   "document": " ".join(turned * (12 + 2 * number))}  # fmt: skip
            file.write(json.dumps(row) + "\n")


def readings(name: str) -> dict:
    with open(f"runs/{name}/readings.jsonl", encoding="utf-8") as file:
        found = [json.loads(line) for line in file]
    told = ("answer", "correct", "scores", "finish", "turns", "tokens", "gold", "changes")
    return {
        one["reading"]["task_id"]: [one["reading"][name] for name in told]
        + [[(m["chunk"], m["memory"], m["tokens"]) for m in one["memories"]]]
        for one in found
    }


def test_it_reads_and_scores_as_the_same_policy_does_here(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "")
    policy = folder(tmp_path / "speaks")
    rows(tmp_path / "rows.jsonl")

    def score(name: str, *who: str) -> dict:
        assert cli.main(["eval", *SAME, *SIZES, *who, "--name", name]) == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    here = score("here", "--policy", str(policy))["by_length"]
    here = [one | {"seconds": 0} for one in here]
    more = ("--config", "chat", "--served-name", "speaks", *FLOATS)
    with program(policy, tmp_path, *more) as url:
        there = ("--endpoint", f"{url}/v1", "--tokenizer", str(policy))
        read = score("there", *there, "--model", "speaks")
        mine, theirs = readings("here"), readings("there")
        assert len(mine) == 12 and theirs == mine
        assert 0 < sum(one[1] for one in mine.values()) < 12
        assert len({str(one[-1]) for one in mine.values()}) > 6  # memories that differ
        assert {one[3] for one in mine.values()} == {"stop", "length"}
        assert [one | {"seconds": 0} for one in read["by_length"]] == here
        other = "there is no model 'gpt-4'; this server has speaks"
        for who, said in (((), "2 models: speaks, speaks:notepad"), (("--model", "gpt-4"), other)):
            assert cli.main(["eval", *SAME, *SIZES, *there, *who, "--name", "bad"]) == 1
            assert said in capsys.readouterr().err
