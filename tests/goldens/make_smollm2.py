"""Makes smollm2.json beside this file: what others compute from SmolLM2-135M-Instruct's GGUF.

    pip install torch==2.13.0 transformers==5.23.0 accelerate gguf==0.19.0 regex
    python tests/goldens/make_smollm2.py SmolLM2-135M-Instruct.Q4_1.gguf   # `make smollm` gets it

transformers reads the file and multiplies it out to float32: logits of the last position of each
text (a few entries, and the logsumexp of all), and greedy text of up to `NEW` tokens. Ids of
ragged text come from its tokenizer and from `PlainBPE` below, which merges in plain Python by the
two patterns that llama.cpp splits by for `smollm`; the two have to agree. Characters whose bytes
the tokenizer lacks are given to them as U+FFFD, which is our rule.
`tests/checkpoint/gguf/test_smollm2.py` reads this without torch.
"""

import json
import sys
from pathlib import Path

import gguf
import numpy as np
import regex
import torch
import transformers

FILE = Path(__file__).parent / "smollm2.json"
NEW = 40  # greedy tokens
KEPT = 24  # logits of a text, spread over the vocabulary, beside the largest
GAP = 2e-3  # between the two best logits along the way, or rounding would decide

TEXTS = [
    "The capital of France is",
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, "
    "must be in want of a wife.\n\nHowever little known the feelings or views of such a man may be "
    "on his first entering a neighbourhood, this truth is so well fixed in the minds of the "
    "surrounding families, that he is considered as the rightful property of some one or other of "
    "their daughters.",
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n"
    "        a, b = b, a + b\n    return",
    "1. Whisk 3 eggs with 250 g of flour.\n2. Add milk (0.5 l), a pinch of salt\n3.",
    "日本の首都は東京です。Die Hauptstadt von Österreich ist",
]
QUESTIONS = [
    "What is the capital of France?",
    "Name three colours of the rainbow.",
    "Write one sentence about the sea.",
    "What is 2 + 2?",
    "Who wrote Romeo and Juliet?",
]
RAGGED = [
    *TEXTS,
    "   leading, trailing   \t\t and  double  spaces \n\n\n\n end ",
    "CRLF\r\nlines\r\n\r\nand\rold Macs\n\rmixed\n \n\t\nx",
    "digits 1 12 123 1234567890 3.14159 1,000,000 2026-11-23T19:31 0x1F ٣٤٥ Ⅷ ½ x²",
    "emoji 😀 👩‍🚀 🏳️‍🌈 🇩🇪 👍🏽 ✅ ☃ 🧑‍🧑‍🧒‍🧒",
    "CJK 中文字符测试，全角标点。「日本語」カタカナ 한국어 조합 ㅎㅏㄴ 𠀀𪚥",
    "combining e\u0301 a\u0308\u0323 n\u0303 \u1e9b\u0323 Å Å ﬁ ǆ",
    "العربية مرحبا ١٢٣ עברית שלום हिन्दी नमस्ते ไทย สวัสดี Ελληνικά Кириллица",
    "it's don't WE'LL they'd I'M you've 'tis rock'n'roll O'Neill’s",
    "```python\nclass A(B):\n\tdef __init__(self, *, x: int = 0) -> None:\n"
    "\t\tself.x=x # ünïcödé\n```",
    '<html><body class="a-b_c">&nbsp;</body></html> {"k": [1, null, true]} '
    "\\n \\u0041 C:\\dir\\f.txt",
    "odd spaces \u00a0nbsp\u2003em\u2009thin\u3000ideographic"
    "\u200bzero\ufeffbom\u2028line\u2029par\x0bvt\x0cff\x85nel",
    "controls \x00\x01\x02\x03 \x05\x07\x08 \x0e\x0f\x10\x11"
    "\x12 \x15\x17\x18\x19\x1a\x1b[2J \x1c\x1e\x1f\x7f end",
    "lost \x04 \x06 \x13\x14\x16 \x1d \U00040000a\U000bffff b\U0007abcd",
    "planes \U0000e000 \U0001fffe \U000e0001 \U000f0000 \U0010ffff \ufffe \uffff \ufffd",
    "long" + "a" * 70 + " " * 40 + "-" * 70 + "=" * 33 + "\n" * 9 + "." * 21,
    "ALLCAPS CamelCase snake_case kebab-case SCREAMING_SNAKE path/to/file.ext user@host.example "
    "https://example.com/?q=a%20b&c=d#e",
]
WORDS = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
DIGITS = regex.compile(r"[^\P{N}0-9]")  # that are not ASCII
LOST = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2}


def readable(text: str) -> str:
    return "".join("\ufffd" if LOST & {*character.encode()} else character for character in text)


class PlainBPE:
    """Byte-level BPE out of a file's metadata, as GPT-2 was published: no library of tokenizers."""

    def __init__(self, path: Path) -> None:
        fields = gguf.GGUFReader(path).fields
        tokens = fields["tokenizer.ggml.tokens"].contents()
        self.ids = {token: n for n, token in enumerate(tokens)}
        merges = fields["tokenizer.ggml.merges"].contents()
        self.ranks = {tuple(pair.split(" ")): n for n, pair in enumerate(merges)}
        alone = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in alone]
        self.letters = {byte: chr(byte) for byte in alone}
        self.letters |= {byte: chr(256 + n) for n, byte in enumerate(others)}

    def encode(self, text: str) -> list[int]:
        words = [word for part in regex.split(r"(\p{N})", text) for word in WORDS.findall(part)]
        return [self.ids[piece] for word in words for piece in self.merged(word)]

    def merged(self, word: str) -> list[str]:
        pieces = [self.letters[byte] for byte in word.encode()]
        while len(pieces) > 1:
            pairs = [*zip(pieces, pieces[1:], strict=False)]
            best = min(pairs, key=lambda pair: self.ranks.get(pair, float("inf")))
            if best not in self.ranks:
                break
            joined: list[str] = []
            while pieces:
                both = tuple(pieces[:2]) == best
                joined.append("".join(best) if both else pieces[0])
                pieces = pieces[2 if both else 1 :]
            pieces = joined
        return pieces


def main(path: Path) -> None:
    there = dict(gguf_file=path.name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **there)
    plain = PlainBPE(path)

    def ids(text: str) -> list[int]:
        found = plain.encode(text)
        theirs = tokenizer(text, add_special_tokens=False)["input_ids"]
        split = DIGITS.search(text)  # transformers does not look at `tokenizer.ggml.pre`
        assert found == theirs or split, (
            f"two tokenizers, two opinions: {text!r}, {found}, {theirs}"
        )
        return found

    ragged = [{"text": text, "ids": ids(readable(text))} for text in RAGGED]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, dtype=torch.float32, **there
    ).eval()
    assert model.config.tie_word_embeddings and model.config.rope_parameters["rope_theta"] == 1e5
    print(sum(p.numel() for p in model.parameters()), "parameters")
    places = np.linspace(0, model.config.vocab_size - 1, KEPT).astype(int)
    texts = []
    for text in TEXTS:
        with torch.no_grad():
            last = model(torch.tensor([ids(text)])).logits[0, -1].double().numpy()
        kept = sorted({*places.tolist(), *np.argsort(-last)[:4].tolist()})
        texts.append({
            "text": text, "entries": kept, "logits": [round(last[n], 6) for n in kept],
            "logsumexp": round(float(np.logaddexp.reduce(last)), 6), "best": int(last.argmax()),
        })  # fmt: skip
    greedy = []
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        given = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        made, closest = greedily(model, given)
        print(f"{question} {tokenizer.decode(made)!r}, the two best logits {closest:.4f} apart")
        if closest > GAP:
            greedy.append({"question": question, "prompt": given, "tokens": made})
    made = {
        "made with": {"torch": torch.__version__, "transformers": transformers.__version__},
        "texts": texts, "greedy": greedy, "ragged": ragged,
    }  # fmt: skip
    FILE.write_text(json.dumps(made, ensure_ascii=True, indent=None, separators=(",", ":")) + "\n")
    print(FILE.stat().st_size, "bytes;", len(greedy), "greedy texts")


@torch.no_grad()
def greedily(model: torch.nn.Module, prompt: list[int]) -> tuple[list[int], float]:
    """The greedy tokens, up to the first stop, and how near a second best came."""
    made: list[int] = []
    closest, state, given = float("inf"), None, torch.tensor([prompt])
    while len(made) < NEW:
        out = model(given, past_key_values=state, use_cache=True)
        best = out.logits[0, -1].topk(2)
        closest = min(closest, float(best.values[0] - best.values[1]))
        made.append(int(best.indices[0]))
        if made[-1] == 2:
            break
        state, given = out.past_key_values, torch.tensor([[made[-1]]])
    return made, closest


if __name__ == "__main__":
    main(Path(sys.argv[1]))
