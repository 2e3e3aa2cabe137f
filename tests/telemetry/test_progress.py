"""The right screen for the right output; a line a step in files, and no word out of its place."""

import errno
import io
import re

import pytest

from notepad_jax.telemetry import progress, terminal_screen, words
from notepad_jax.telemetry.line_screen import LineScreen
from notepad_jax.telemetry.screen import Screen, SilentScreen
from notepad_jax.telemetry.terminal_screen import TerminalScreen


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


def test_a_step_may_end_while_the_table_is_drawn(monkeypatch):
    """The screen is drawn in a thread of its own."""
    table = TerminalScreen(Terminal()).table("Training", ["step", "reward"], 9)
    table.row(step=1, reward=0.5)
    table.row(step=2, reward=0.5)
    monkeypatch.setattr(terminal_screen, "show", lambda value: table.row(step=3) or str(value))
    assert table.render().row_count == 2


def test_a_terminal_gets_no_control_characters():
    told = "a\x1b[2J\x07b\x9b\x7f\r\x00 c\td\n\ud800 \U0001f600\u200d"
    assert words.harmless(told) == (
        "a\ufffd[2J\ufffdb\ufffd\ufffd\ufffd\ufffd c\td\n\ufffd \U0001f600\u200d"
    )
    for screen in (LineScreen, TerminalScreen):
        stream = Terminal()
        screen(stream).say("evil\x1b]0;\x07")
        screen(stream).warn("evil\x1b]0;\x07")
        assert stream.getvalue().count("evil\ufffd]0;\ufffd") == 2


def test_the_screen_follows_the_stream(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(progress.choose(stream=io.StringIO()), LineScreen)
    assert isinstance(progress.choose(stream=Terminal()), TerminalScreen)
    assert isinstance(progress.choose(quiet=True, stream=Terminal()), SilentScreen)


@pytest.mark.parametrize("name, value", [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_no_escapes_where_none_are_wanted(name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    stream = Terminal()
    use(progress.choose(stream=stream))
    assert "\x1b" not in stream.getvalue() and "\r" not in stream.getvalue()
    assert "done [really]" in stream.getvalue()


def test_a_file_gets_one_line_a_step_below_its_heading():
    stream = io.StringIO()
    use(LineScreen(stream, clock=Clock()))
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
    LineScreen(stream).table("Training", ["step"], 9, done=4).row(step=4)
    assert stream.getvalue().splitlines() == ["Training", "5/9  step 4"]


def test_a_file_gets_one_line_every_few_seconds():
    stream, clock = io.StringIO(), Clock()
    screen = LineScreen(stream, every=5.0, clock=clock)
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
    bar = LineScreen(stream, clock=Clock()).bar("reading 8K", 3, "turns")
    bar.advance(3, right="1/2")
    bar.advance(0, right="2/3")
    bar.finish()
    bar.finish()
    assert stream.getvalue() == "reading 8K: 3/3 turns  0.0 s  right 2/3\n"


def test_a_total_may_turn_out_to_be_another():
    stream = io.StringIO()
    bar = LineScreen(stream, every=0.0, clock=Clock()).bar("reading 8K", 64, "turns")
    bar.advance(3)
    bar.expect(3)
    bar.finish()
    assert stream.getvalue().splitlines() == [
        "reading 8K: 3/64 turns  0.0 s",
        "reading 8K: 3/3 turns  0.0 s",
    ]


def test_a_terminal_goes_on_where_there_is_more_than_was_thought(monkeypatch):
    screen, stream = on_a_terminal(monkeypatch)
    bar = screen.bar("reading 8K", 2, "turns")
    bar.advance(2)
    assert screen._bars.tasks[0].finished
    bar.expect(5)
    assert not screen._bars.tasks[0].finished
    bar.finish()
    assert "2/5" in stream.getvalue()


def test_an_activity_that_ends_early_says_where():
    stream = io.StringIO()
    bar = LineScreen(stream, clock=Clock()).bar("chunks", None)
    bar.advance(4096)
    bar.finish()
    assert stream.getvalue() == "chunks: 4,096  0.0 s\n"


def on_a_terminal(monkeypatch, busy=lambda: "") -> tuple[Screen, Terminal]:
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
    (column,) = [c for c in bars.columns if isinstance(c, terminal_screen._TimeLeft)]
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


def read_two_chunks(screen):
    turns = screen.transcript("reading", "tokens")
    turns.under_way("chunk 1 of about 3", "reading 9 tokens", 0, 15)
    turns.under_way("chunk 1 of about 3", "Ann is", 5, 15)
    turns.under_way("chunk 1 of about 3", "Ann is red\nBob", 5, 15)
    turns.wrote("chunk 1 of about 3: Ann is red\n  Bob is blue")
    turns.under_way("chunk 2 of 2", "Ann", 10, 10)
    turns.passed("chunk 2 of 2: nothing new")
    turns.finish()


def test_a_file_gets_one_line_a_turn():
    stream = io.StringIO()
    read_two_chunks(LineScreen(stream))
    assert stream.getvalue().splitlines() == [
        "chunk 1 of about 3: Ann is red Bob is blue",
        "chunk 2 of 2: nothing new",
    ]


def words_of(stream) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())


def live(screen) -> str:
    with screen.console.capture() as shown:
        screen.console.print(screen._render())
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.get())


def test_a_terminal_shows_the_end_of_the_text_that_grows(monkeypatch):
    screen, stream = on_a_terminal(monkeypatch)
    turns = screen.transcript("reading", "tokens")
    turns.under_way("chunk 1 of about 3", "\n".join(f"line {n}" for n in range(20)), 5, 15)
    lines = live(screen).splitlines()
    assert [line.strip() for line in lines[:-1]] == [f"line {n}" for n in range(14, 20)]
    assert "chunk 1 of about 3" in lines[-1] and "5/15 tokens" in lines[-1]
    turns.under_way("chunk 1 of about 3", "evil\x1b]0;\x07", 5, 15)
    assert "line 19" not in live(screen) and "evil\ufffd]0;\ufffd" in live(screen)
    turns.wrote("chunk 1 of about 3: all of it")
    assert "evil" not in live(screen) and "all of it" in words_of(stream)
    screen.work(10, 1, 1.0)
    turns.under_way("answer", "", 10, 10)
    assert not screen._bars.tasks[0].finished  # all is read, and it goes on
    turns.finish()
    assert live(screen).strip() == "" and "10/10 tokens" in words_of(stream)


def test_a_terminal_keeps_what_was_written_and_no_turn_without_news(monkeypatch):
    screen, stream = on_a_terminal(monkeypatch)
    with screen:
        read_two_chunks(screen)
    assert "Bob is blue" in words_of(stream) and "nothing new" not in words_of(stream)


def test_ctrl_c_in_a_turn_leaves_a_terminal_with_its_cursor(monkeypatch):
    screen, stream = on_a_terminal(monkeypatch)
    with pytest.raises(KeyboardInterrupt), screen:
        screen.transcript("reading", "tokens").under_way("chunk 1", "Ann", 0, None)
        raise KeyboardInterrupt
    shown = stream.getvalue()
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l") and "Ann" in words_of(stream)


def test_what_engines_do_stands_below_what_is_under_way(monkeypatch):
    screen, _ = on_a_terminal(monkeypatch)
    clock = screen.meter._clock = Clock()
    table = screen.table("training", ["step"], 9)
    screen.bar("validating", 4, "readings")
    assert "tokens/s" not in live(screen)
    screen.work(50, 3, 2.0)
    assert live(screen).splitlines()[-1].strip() == "25 tokens/s  3 turns"
    table.row(step=1)
    screen.work(50, 1, 0.0)
    assert live(screen).splitlines()[-1].strip() == "50 tokens/s  1 turns"  # of this step
    table.finish()
    assert live(screen).splitlines()[-1].strip() == "50 tokens/s"
    clock.now += 60
    assert "tokens/s" not in live(screen)


def test_a_file_is_told_while_a_turn_is_under_way():
    stream, clock = io.StringIO(), Clock()
    screen = LineScreen(stream, every=5.0, clock=clock)
    table = screen.table("training", ["step"], 9)
    bar = screen.bar("reading 8K", 40, "turns")
    bar.advance(2)
    for clock.now in (2.0, 6.0, 7.0, 31.0):
        screen.work(100, 1, 2.0)
    bar.finish()
    table.row(step=1)
    clock.now = 61.5
    screen.work(100, 2, 1.0)
    table.finish()
    clock.now = 99.0
    screen.work(100, 1, 1.0)
    assert stream.getvalue().splitlines() == [
        "training",
        "reading 8K: 2/40 turns  6.0 s  33 tokens/s",
        "1/9  under way, 31.0 s  4 turns  50 tokens/s",
        "reading 8K: 2/40 turns  31.0 s  50 tokens/s",
        "1/9  step 1",
        "2/9  under way, 30.5 s  2 turns  100 tokens/s",
    ]


@pytest.mark.parametrize("problem", [BrokenPipeError(), OSError(errno.ENOSPC, "full")])
def test_nothing_ends_because_nobody_reads_its_lines_and_no_engine_by_a_full_disk(problem):
    class Gone(io.StringIO):
        def write(self, text):
            raise problem

    clock = Clock()
    screen = LineScreen(Gone(), clock=clock)
    bar = screen.bar("reading 8K", 40, "turns")
    clock.now = 6.0
    screen.work(100, 1, 2.0)
    clock.now = 12.0
    if isinstance(problem, BrokenPipeError):
        bar.advance()
        bar.finish()
        screen.say("done")
        return
    with pytest.raises(OSError, match="full"):
        bar.advance()


def test_eighty_columns_are_enough_to_say_compiling(monkeypatch):
    screen, _ = on_a_terminal(monkeypatch, lambda: "compiling")
    monkeypatch.setenv("COLUMNS", "80")
    screen.table("reinforcement learning", ["step"], 100)
    screen.transcript("reading", "tokens").under_way("chunk 12 of about 1,024", "Ann", 512, 98765)
    assert [line.split()[-1] for line in live(screen).splitlines()[-2:]] == ["compiling"] * 2


def test_silence_is_silent(capsys):
    use(progress.choose(quiet=True))
    read_two_chunks(progress.choose(quiet=True))
    progress.choose(quiet=True).work(1, 1, 1.0)
    assert capsys.readouterr() == ("", "")


def test_numbers_are_short():
    assert [words.show(v) for v in (3670016, 0.123456, 1e-7, "x")] == [
        "3,670,016",
        "0.1235",
        "1e-07",
        "x",
    ]
