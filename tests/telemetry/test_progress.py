"""The right screen for the right output; plain lines come every few seconds, not more."""

import io

from notepad_jax.telemetry import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def use(screen):
    with screen:
        table = screen.table("Training", ["step", "reward"])
        bar = screen.bar("reading 8K", 3, "questions")
        for step in range(3):
            table.row(step=step, reward=step / 3)
            bar.advance(accuracy=0.5)
        bar.finish()
        screen.say("done [really]")


def test_a_terminal_gets_no_control_characters():
    told = "a\x1b[2J\x07b\x9b\x7f\r\x00 c\td\n\ud800 \U0001f600\u200d"
    assert progress.harmless(told) == (
        "a\ufffd[2J\ufffdb\ufffd\ufffd\ufffd\ufffd c\td\n\ufffd \U0001f600\u200d"
    )
    for screen in (progress.LineScreen, progress.TerminalScreen):
        stream = Terminal()
        screen(stream).say("evil\x1b]0;\x07")
        screen(stream).warn("evil\x1b]0;\x07")
        assert stream.getvalue().count("evil\ufffd]0;\ufffd") == 2


def test_the_screen_follows_the_stream():
    assert isinstance(progress.choose(stream=io.StringIO()), progress.LineScreen)
    assert isinstance(progress.choose(stream=Terminal()), progress.TerminalScreen)
    assert isinstance(progress.choose(quiet=True, stream=Terminal()), progress.SilentScreen)


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


def test_an_activity_that_ends_early_says_where():
    stream = io.StringIO()
    bar = progress.LineScreen(stream, clock=Clock()).bar("chunks", None)
    bar.advance(4096)
    bar.finish()
    assert stream.getvalue() == "chunks: 4,096  0.0 s\n"


def test_a_terminal_shows_bars_and_the_newest_rows():
    stream = Terminal()
    screen = progress.TerminalScreen(stream)
    use(screen)
    shown = stream.getvalue()
    assert "reading 8K" in shown and "3/3" in shown and "0.6667" in shown
    assert "done [really]" in shown


def test_silence_is_silent(capsys):
    use(progress.choose(quiet=True))
    assert capsys.readouterr() == ("", "")


def test_numbers_are_short():
    assert [progress.show(v) for v in (3670016, 0.123456, 1e-7, "x")] == [
        "3,670,016",
        "0.1235",
        "1e-07",
        "x",
    ]
