"""How large the code is, and may be: `make lint`.

A new concept takes an old one's place. Where one is worth more than what it costs, the number is
raised in the same change, and the change says why.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("notepad_jax", "pallas_kernels")
FILES = 451  # Python files of both packages
CODE = 48_502  # their lines with code: no comments, no docstrings, nothing blank
LONGEST = 350  # lines of a file, all of them
LONGER = {"notepad_jax/types.py"}  # the nouns, read first and together
NOTHING = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip


def code_lines(text: str) -> int:
    """Returns how many lines of a file have code."""
    docs: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if ast.get_docstring(node, clean=False) is not None and first is not None:
                docs.update(range(first.lineno, first.end_lineno + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NOTHING:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - docs)


def problems(root: Path = ROOT) -> Iterator[str]:
    """Yields a line for each bound that is passed."""
    texts = {
        str(path.relative_to(root)): path.read_text(encoding="utf-8")
        for package in PACKAGES
        for path in sorted((root / package).rglob("*.py"))
    }
    if len(texts) > FILES:
        yield f"{len(texts)} files, and {FILES} are meant"
    if (lines := sum(map(code_lines, texts.values()))) > CODE:
        yield f"{lines:,} lines of code, and {CODE:,} are meant"
    for name, text in texts.items():
        if (lines := len(text.splitlines())) > LONGEST and name not in LONGER:
            yield f"{name} has {lines} lines, and {LONGEST} are meant"


if __name__ == "__main__":
    sys.exit("\n".join(f"budget: {line} (tests/budget.py)" for line in problems()) or None)
