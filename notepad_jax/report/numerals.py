"""Number formatting: shares, losses, durations, counts.

Pure functions of one value; the templates know them as filters (`render`), and the programs
print with them. Beside: `eval.lengths`, which writes lengths.
"""

from __future__ import annotations

from notepad_jax.eval.summary import Share


def percent(share: float) -> str:
    """Returns "98.4%"."""
    return f"{100 * share:.1f}%"


def interval(share: Share) -> str:
    """Returns "91.7 to 99.7", in per cent."""
    return f"{100 * share.low:.1f} to {100 * share.high:.1f}"


def change(loss: float) -> str:
    """Returns how a share changed: a loss of 0.047 is "-4.7", with a true minus sign."""
    text = f"{-100 * loss:+.1f}"
    return "0.0" if float(text) == 0 else text.replace("-", "\N{MINUS SIGN}")


def duration(seconds: float) -> str:
    """Returns "0.8 s", "12 s", "2 min 05 s" or "1 h 02 min"."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def thousands(number: int) -> str:
    """Returns "1,200"."""
    return f"{number:,}"


def counted(number: int, one: str, many: str) -> str:
    """Returns "1 reading" or "1,200 readings"."""
    return f"{number:,} {one if number == 1 else many}"
