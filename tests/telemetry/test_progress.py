"""The right screen for the right output; a line a step in files, and no word out of its place."""

import io
import re

import pytest

from notepad_jax.telemetry import progress, words


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def use(screen):
    with screen:
        screen.phase("1/2 learn")
        table = screen.table("Training", ["step", "reward"], 3)
        for step in range(3):
            table.row(step=step, reward=step / 3)
        table.finish()
        screen.phase("2/2 measure")
        bar = screen.bar("reading 8K", 3, "questions")
        for _ in range(3):
            bar.advance(accuracy=0.5)
        bar.finish()
        screen.say("done [really]")


def test_a_terminal_gets_no_control_characters():
    told = "a\x1b[2J\x07b\x9b\x7f\r\x00 c\td\n\ud800 \U0001f600\u200d"
    assert words.harmless(told) == (
        "a\ufffd[2J\ufffdb\ufffd\ufffd\ufffd\ufffd c\td\n\ufffd \U0001f600\u200d"
    )
    for screen in (progress.LineScreen, progress.TerminalScreen):
        stream = Terminal()
        screen(stream).say("evil\x1b]0;\x07")
        screen(stream).warn("evil\x1b]0;\x07")
        assert stream.getvalue().count("evil\ufffd]0;\ufffd") == 2


def test_the_screen_follows_the_stream(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(progress.choose(stream=io.StringIO()), progress.LineScreen)
    assert isinstance(progress.choose(stream=Terminal()), progress.TerminalScreen)
    assert isinstance(progress.choose(quiet=True, stream=Terminal()), progress.SilentScreen)


@pytest.mark.parametrize("name, value", [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_no_escapes_where_none_are_wanted(name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    stream = Terminal()
    use(progress.choose(stream=stream))
    assert "\x1b" not in stream.getvalue() and "\r" not in stream.getvalue()
    assert "done [really]" in stream.getvalue()


def test_a_file_gets_one_line_a_step_below_its_heading():
    stream = io.StringIO()
    use(progress.LineScreen(stream, clock=Clock()))
    assert stream.getvalue().splitlines() == [
        "1/2 learn",
        "Training",
        "1/3  step 0  reward 0",
        "2/3  step 1  reward 0.3333",
        "3/3  step 2  reward 0.6667",
        "2/2 measure",
        "reading 8K: 3/3 questions  0.0 s  accuracy 0.5",
        "done [really]",
    ]


def test_steps_that_were_done_before_are_counted():
    stream = io.StringIO()
    progress.LineScreen(stream).table("Training", ["step"], 9, done=4).row(step=4)
    assert stream.getvalue().splitlines() == ["Training", "5/9  step 4"]


def test_a_file_gets_one_line_every_few_seconds():
    stream, clock = io.StringIO(), Clock()
    screen = progress.LineScreen(stream, every=5.0, clock=clock)
    bar = screen.bar("reading 8K", 100, "questions")
    for done in range(1, 101):
        clock.now = done * 0.1
        bar.advance(accuracy=0.5)
    bar.finish()
    assert stream.getvalue().splitlines() == [
        "reading 8K: 50/100 questions  5.0 s  accuracy 0.5",
        "reading 8K: 100/100 questions  10.0 s  accuracy 0.5",
    ]


def test_the_end_is_told_once_with_what_came_last():
    stream = io.StringIO()
    bar = progress.LineScreen(stream, clock=Clock()).bar("reading 8K", 3, "turns")
    bar.advance(3, right="1/2")
    bar.advance(0, right="2/3")
    bar.finish()
    bar.finish()
    assert stream.getvalue() == "reading 8K: 3/3 turns  0.0 s  right 2/3\n"


def test_an_activity_that_ends_early_says_where():
    stream = io.StringIO()
    bar = progress.LineScreen(stream, clock=Clock()).bar("chunks", None)
    bar.advance(4096)
    bar.finish()
    assert stream.getvalue() == "chunks: 4,096  0.0 s\n"


def on_a_terminal(monkeypatch, busy=lambda: "") -> tuple[progress.Screen, Terminal]:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    stream = Terminal()
    return progress.choose(stream=stream, busy=busy), stream


def test_on_a_terminal_what_has_ended_stands_below_its_own_heading(monkeypatch):
    screen, stream = on_a_terminal(monkeypatch)
    use(screen)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())  # words alone
    # The last of each: what moved before stands above it and was overwritten.
    order = ["1/2 learn", "0.6667", "Training", "2/2 measure", "reading 8K", "done [really]"]
    assert sorted(order, key=shown.rindex) == order
    assert shown.rindex("0.6667") < shown.rindex("3/3 steps") < shown.rindex("2/2 measure")


def left(bars) -> str:
    (column,) = [c for c in bars.columns if isinstance(c, progress._TimeLeft)]
    return column.render(bars.tasks[0]).plain


def test_a_terminal_counts_down_and_says_when_it_compiles(monkeypatch):
    busy = [""]
    screen, _ = on_a_terminal(monkeypatch, lambda: busy[0])
    clock = screen._bars.get_time = Clock()
    bar = screen.bar("train", 10, "steps")
    screen._bars.start_task(0)
    assert left(screen._bars) == ""  # nobody knows yet
    busy[0] = "compiling"
    assert left(screen._bars) == "compiling"
    busy[0] = ""
    for clock.now in (10.0, 20.0, 30.0):
        bar.advance()
    assert left(screen._bars) == "01:10"
    clock.now = 37.0  # it does not stand still until the next step
    assert left(screen._bars) == "01:03"
    bar.finish()
    bar.finish()
    assert screen._bars.tasks == []


def test_silence_is_silent(capsys):
    use(progress.choose(quiet=True))
    assert capsys.readouterr() == ("", "")


def test_numbers_are_short():
    assert [words.show(v) for v in (3670016, 0.123456, 1e-7, "x")] == [
        "3,670,016",
        "0.1235",
        "1e-07",
        "x",
    ]
