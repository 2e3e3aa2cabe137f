"""The command line as a user meets it: results, refusals, exit codes."""

import errno
import io
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from notepad_jax import cli
from notepad_jax.commands import parser
from notepad_jax.engine import launches
from notepad_jax.programs import quickstart
from notepad_jax.setup import configuration
from notepad_jax.starter.synthetic import make_tasks
from notepad_jax.telemetry import run_folder
from notepad_jax.telemetry.screen import SilentScreen
from notepad_jax.training import train
from tests import limits

ROOT = Path(__file__).parents[2]
POLICY = ["--policy", str(ROOT / "data" / "starter")]
POLICY_KEY = [f"--config.policy={ROOT / 'data' / 'starter'}"]


@pytest.fixture
def story(tmp_path):
    task = make_tasks(5, tokens=4096, questions=1, unanswerable=0.0, two_hop=0.0)[0]
    path = tmp_path / "story.txt"
    path.write_text("".join(task.document.pieces()))
    return path, task


def one_line(capsys) -> str:
    err = capsys.readouterr().err.strip().splitlines()
    assert len(err) == 1 and err[0].startswith("notepad-jax: ")
    return err[0]


def test_ask_shows_the_memory_and_answers(story, capsys):
    path, task = story
    assert cli.main(["ask", *POLICY, "--json", str(path), task.question]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["chunks"] == 4 and answer["tokens"] == 4096
    assert answer["answer"]
    assert answer["memories"][0] == [1, answer["memories"][0][1]]


def test_ask_reads_standard_input(story, capsys, monkeypatch):
    path, task = story
    with path.open("rb") as file:
        monkeypatch.setattr("sys.stdin", type("Stdin", (), {"buffer": file}))
        assert cli.main(["ask", *POLICY, "--json", "-", task.question]) == 0
    assert json.loads(capsys.readouterr().out)["chunks"] == 4
    monkeypatch.setattr("sys.stdin", None)  # <&-
    assert cli.main(["ask", *POLICY, "--json", "-", task.question]) == 1
    assert "standard input is closed; name a file" in one_line(capsys)


@pytest.mark.parametrize(
    "content, says",
    [
        (b"", "is empty"),
        (b"\xef\xbb\xbf", "is empty"),  # a byte order mark alone
        (b"PK\x03\x04\x00\x00rest", "binary file"),
        (b"caf\xe9 au lait " * 9, "not UTF-8 text"),
        (None, "No such file"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, capsys, content, says):
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    assert cli.main(["ask", *POLICY, "--json", str(path), "code of Ada ?"]) == 1
    assert says in one_line(capsys)


def test_an_engine_that_dies_is_one_line_and_exit_code_1(story, capsys, monkeypatch):
    def broken(*arguments):
        raise MemoryError("no room on the device")

    monkeypatch.setattr(launches, "start_tails", broken)
    assert cli.main(["ask", *POLICY, "--json", str(story[0]), "code of Ada ?"]) == 1
    assert "the engine failed: MemoryError: no room on the device" in one_line(capsys)


def test_a_question_beyond_its_limit(story, capsys):
    assert cli.main(["ask", *POLICY, "--json", str(story[0]), "code of Ada ? " * 5]) == 1
    assert "limit is 8" in one_line(capsys)


@pytest.mark.parametrize(
    "words, says",
    [
        (["--config.grpo.clip_hihg=1"], "did you mean grpo.clip_high?"),
        (["--config.clip_high=1"], "did you mean grpo.clip_high?"),
        (["--config.steps=many"], "'many'"),
        (["--config.optimizer.learning_rate=nan"], "optimizer.learning_rate is nan"),
        (["--config", "quikstart"], "did you mean quickstart?"),
        (["--config.policy=/nowhere"], "/nowhere"),
        (["--config.grpo.advantage=drgrpo"], "dr_grpo"),
        (["--config.reading.template=nosuch"], "nosuch"),
        (["--config.engine.pages=3"], "needs"),
        (["--config.engine.slots=0"], "engine.slots is 0"),
        (["--config.rollout.group_size=1"], "at least 2"),
        (["--config.data.questions=99"], "99 questions"),
    ],
)
def test_configs_that_cannot_work(tmp_path, capsys, monkeypatch, words, says):
    monkeypatch.chdir(tmp_path)
    words = words if any("policy" in w for w in words) else [
        *words, f"--config.policy={ROOT / 'data' / 'starter'}"
    ]  # fmt: skip
    assert cli.main(["train", "--json", *words]) == 1
    assert says in one_line(capsys)
    assert not (tmp_path / "runs").exists()  # the name of a refused run is not taken


def test_a_run_is_never_overwritten(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    assert cli.main(["train", "--json", "--name", "mine"]) == 1
    assert "--resume" in one_line(capsys)
    assert cli.main(["train", "--json", "--name", "other", "--resume"]) == 1
    assert "no run runs/other" in one_line(capsys)


@pytest.mark.parametrize(
    "name", [".", "../up", "a/b", "/tmp/mine", "a\\b", "a\nb", "-x", "x" * 300]
)
def test_a_name_cannot_leave_the_folder_of_runs(tmp_path, capsys, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    for command in ("train", "quickstart", "eval"):
        for more in ([], ["--resume"]):
            assert cli.main([command, "--json", f"--name={name}", *POLICY_KEY, *more]) == 1
            assert "name" in one_line(capsys)
    assert list(tmp_path.iterdir()) == []


def elsewhere(work):
    """Runs `work` as another holder of a folder, as another process is."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def test_a_run_that_somebody_writes_to_is_left_alone(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "mine"
    with run_folder.opened(folder, resume=False):
        (folder / "config.json").write_text("{}")
        before = limits.content(folder)
        for command in ("train", "quickstart", "eval"):
            words = [command, "--json", "--name", "mine", *POLICY_KEY]
            assert elsewhere(lambda words=words: cli.main([*words, "--resume"])) == 1
            assert f"runs/mine is in use by process {os.getpid()} on" in one_line(capsys)
            assert elsewhere(lambda words=words: cli.main(words)) == 1
            assert "runs/mine exists" in one_line(capsys)
        config = configuration.load("quickstart", POLICY_KEY)
        for use in (train.train, quickstart.run):
            with pytest.raises(ValueError, match="mine is in use by process"):
                elsewhere(lambda use=use: use(config, folder, SilentScreen(), resume=True))
            with pytest.raises(ValueError, match="mine exists"):
                elsewhere(lambda use=use: use(config, folder, SilentScreen()))
    assert limits.content(folder) == before


@pytest.mark.parametrize("command", ["train", "quickstart", "eval"])
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt, ValueError("no"), OSError(28, "No space left on device")]
)
def test_a_start_that_failed_leaves_nothing(tmp_path, capsys, monkeypatch, command, error):
    """After the settings are written, which is where the parts are put together."""

    def fails(*arguments, **named):
        assert list(tmp_path.rglob("config.json")) or command == "eval"
        raise error

    monkeypatch.chdir(tmp_path)
    place = {"train": "load_policy", "quickstart": "service", "eval": "load_policy"}[command]
    monkeypatch.setattr(f"notepad_jax.setup.builders.{place}", fails)
    assert cli.main([command, "--json", "--name", "mine", *POLICY_KEY]) in (1, 130)
    assert "--resume" not in one_line(capsys)
    assert list(tmp_path.iterdir()) == []


DAMAGED = {
    "cut": (b'{"steps": 7, "see', "is cut off, or no JSON"),
    "empty": (b"", "is empty"),
    "list": (b"[]", "holds no JSON object"),
    "bytes": (b'{"steps": "\xff"}', "is not UTF-8"),
    "missing": (None, "cannot be read (No such file or directory)"),
}


@pytest.mark.parametrize("command", ["train", "quickstart", "eval"])
@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_settings_are_named_and_may_be_said_again(
    tmp_path, capsys, monkeypatch, command, damage
):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    content, says = DAMAGED[damage]
    if content is not None:
        (folder / "config.json").write_bytes(content)
    before = limits.content(folder)
    words = [command, "--json", "--name", "mine", "--resume", *POLICY_KEY, "--config.steps=3"]
    assert cli.main(words) == 1
    assert f"runs/mine/config.json {says}; say --config again" in one_line(capsys)
    assert limits.content(folder) == before
    seen = []
    for place in ("training.train.train", "programs.quickstart.run", "programs.subjects.named"):
        monkeypatch.setattr(
            f"notepad_jax.{place}",
            lambda config, *arguments, **options: (
                seen.append(config) or (_ for _ in ()).throw(ValueError("x"))
            ),
        )
    assert cli.main([*words, "--config", "quickstart"]) == 1
    assert "x" in one_line(capsys) and seen[0].steps == 3


def test_results_that_nobody_can_keep_end_in_one_line(tmp_path, capsys, monkeypatch):
    words = ["build", "ruler", "--tasks", "vt", "--text", "noise", "--lengths", "2k",
             "--samples", "1", "--out", str(tmp_path), "--json"]  # fmt: skip
    full = open("/dev/full", "w")  # what it could not print is dropped when it is closed
    monkeypatch.setattr(sys, "stdout", full)
    assert cli.main(words) == 1
    assert one_line(capsys).startswith("notepad-jax: the disk is full, make room (")
    full.close()


def unread():
    """A pipe's end to write to, whose reader is gone."""
    read, write = os.pipe()
    os.close(read)
    return open(write, "w")


def test_results_may_be_left_unread_and_so_may_progress(story, capsys, monkeypatch):
    path, task = story
    for stream, words in (("stdout", ["--json"]), ("stderr", [])):
        with monkeypatch.context() as patched:
            patched.setattr(sys, stream, unread())
            assert cli.main(["ask", *POLICY, *words, str(path), task.question]) == 0
    assert "chunks that changed the memory" in capsys.readouterr().out
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", unread())
        assert cli.main(["ask", *POLICY, "/nowhere", task.question]) == 1


def test_a_pipe_that_breaks_within_a_program_is_no_success(story, capsys, monkeypatch):
    def gone(*arguments):
        raise BrokenPipeError(errno.EPIPE, "the worker is gone")

    monkeypatch.setattr("notepad_jax.commands.ask.ask.check_asked", gone)
    assert cli.main(["ask", *POLICY, "--json", str(story[0]), "code of Ada ?"]) == 1
    assert "the worker is gone" in one_line(capsys)


def test_a_full_disk_leaves_policies_and_task_files_as_they_were(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    build = ["build", "ruler", "--tasks", "vt", "--text", "noise", "--samples", "2", "--out"]
    assert cli.main(["import-hf", POLICY[1], "ours"]) == 0
    assert cli.main(["export-hf", "ours", "theirs"]) == 0
    assert cli.main([*build, "tasks", "--lengths", "2k"]) == 0
    commands = (
        ["import-hf", POLICY[1], "new"],
        ["import-hf", POLICY[1], "ours", "--overwrite"],
        ["export-hf", "ours", "new"],
        ["export-hf", "ours", "theirs", "--overwrite", "--dtype", "float32"],
        [*build, "tasks", "--lengths", "2k,4k"],
    )
    before = limits.content(tmp_path)
    capfd.readouterr()
    for size in (2_000, 10_000, 200_000):
        for words in commands:
            if words[0] != "build" or size < 12_000:
                with limits.largest_file(size):
                    assert cli.main([*words, "--json"]) == 1
                assert "the disk is full" in one_line(capfd)
            assert limits.content(tmp_path) == before, (size, words)


def test_ctrl_c_says_how_to_go_on(tmp_path, capsys, monkeypatch):
    def interrupted(config, folder, screen, resume, step, mended, profiled):
        (folder / "checkpoints" / "0").mkdir(parents=True)
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("notepad_jax.training.train.train", interrupted)
    assert cli.main(["train", "--json", "--name", "mine"]) == 130
    assert "train --name mine --resume" in one_line(capsys)


def test_the_command_line_itself(capsys):
    for words in ([], ["frobnicate"], ["ask"], ["train", "--nmae", "x"]):
        with pytest.raises(SystemExit) as stopped:
            cli.main(words)
        assert stopped.value.code == 2
    with pytest.raises(SystemExit) as stopped:
        cli.main(["ask", "--help"])
    assert stopped.value.code == 0
    assert "story.txt" in capsys.readouterr().out


def test_every_command_has_its_file():
    files = {path.stem for path in Path(parser.__file__).parent.glob("*.py")}
    assert files - {"__init__", "parser", "options"} == {
        name.replace("-", "_") for name in parser.COMMANDS
    }


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["tarin"], []])
def test_what_needs_no_command_does_not_wait_for_jax(words):
    program = (
        "import sys; from notepad_jax import __main__\n"
        "try: __main__.main()\n"
        "except SystemExit as end: code = end.code\n"
        "assert not {'jax', 'numpy', 'ml_collections'} & set(sys.modules)\n"
        "sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == (0 if words and words[0].startswith("-") else 2)
    assert "train" in done.stdout + done.stderr or words == ["--version"] or not words
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "words, says",
    [
        (["trian"], "there is no command 'trian'; did you mean train?"),
        (["frobnicate"], "there are quickstart, train"),
        (["train", "--nmae", "x"], "unrecognized arguments: --nmae x; did you mean --name?"),
        (["eval", "--lenghts=2k"], "did you mean --lengths?"),
        (["train", "--steps", "3"], "did you mean --config.steps?"),
        (["train", "--learning-rate=1"], "did you mean --config.optimizer.learning_rate?"),
        (["export-hf", "--stpe", "3", "a", "b"], "did you mean --step?"),
        (["train", "--zzz"], "unrecognized arguments: --zzz (see notepad-jax train --help)\n"),
    ],
)
def test_what_comes_near_a_misspelt_word_is_named(capsys, words, says):
    with pytest.raises(SystemExit) as stopped:
        cli.main(words)
    assert stopped.value.code == 2 and says in capsys.readouterr().err


def test_a_value_may_stand_behind_its_key():
    words = ["--config.steps", "3", "--name", "x", "--config.optimizer.weight_decay", "-1"]
    told = ["--config.steps=3", "--name", "x", "--config.optimizer.weight_decay=-1"]
    assert configuration.joined(words) == told
    assert configuration.joined(told) == told
    left = ["--config.steps", "--json", "--", "--config.steps", "3"]
    assert configuration.joined(left) == left
    assert cli.parsed(["ask", "--config.seed", "7", "file", "q"])[1] == ["--config.seed=7"]
    with pytest.raises(ValueError, match="'--config.steps' is no override; write"):
        configuration.load("quickstart", ["--config.steps"])


def test_a_suite_that_is_not_there_is_named_before_its_reader(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["eval", "--json", "--suite", "rulr"]) == 1
    assert "nolima, stories); did you mean ruler?" in one_line(capsys)


def test_train_takes_a_policy(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "--json", "--policy", "no/such"]) == 1
    assert "no/such" in one_line(capsys)


def test_a_resumed_run_keeps_its_settings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen = []
    monkeypatch.setattr(
        "notepad_jax.training.train.train",
        lambda config, folder, screen, resume, step, mended, profiled: (
            seen.append(config) or folder
        ),
    )
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    saved = {"steps": 7, "evaluate": {"lengths": ["2k"]}, "seed": 3}
    (folder / "config.json").write_text(json.dumps(saved))
    words = ["train", "--json", "--name", "mine", "--resume", "--config.seed=4"]
    assert cli.main(words) == 0
    assert (seen[0].steps, seen[0].seed, seen[0].evaluate.lengths) == (7, 4, ("2k",))


def test_lists_can_be_changed_and_sections_cannot():
    config = configuration.load("quickstart", ["--config.evaluate.lengths=('2k')"])
    assert config.evaluate.lengths == ("2k",)
    with pytest.raises(ValueError, match="change it in a config file"):
        configuration.load("starter", ["--config.lessons=1"])


def test_a_policy_goes_in_and_out_and_reads_the_same(story, tmp_path, capsys):
    path, task = story
    ours, theirs = str(tmp_path / "ours"), tmp_path / "theirs"
    assert cli.main(["import-hf", POLICY[1], ours, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == 225_024
    out = ["export-hf", ours, str(theirs), "--dtype", "float32", "--part-size", "0.0003"]
    assert cli.main([*out, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["files"]) > 4
    answers = []
    for policy in (POLICY[1], ours, str(theirs)):
        assert cli.main(["ask", "--policy", policy, "--json", str(path), task.question]) == 0
        answers.append(json.loads(capsys.readouterr().out)["memories"])
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize(
    "words, says",
    [
        (["import-hf", "nowhere", "{}/x"], "nowhere is not a folder"),
        (["import-hf", POLICY[1], "{}", "--dtype", "int4"], "dtype is 'int4'"),
        (["export-hf", "{}", "{}/x"], "here; give a run (runs/NAME) or a Hugging Face folder"),
        (["export-hf", "{}", "{}/x", "--part-size", "0"], "--part-size is 0"),
    ],
)
def test_conversions_refuse_in_one_line(words, says, tmp_path, capsys):
    assert cli.main([word.format(tmp_path / "here") for word in words]) == 1
    assert says in one_line(capsys)
    assert not (tmp_path / "here").exists()


@pytest.mark.slow
def test_a_program_that_failed_waits_for_no_thread():
    """As orbax's wait for a folder that a disk refused: its line would stand there for minutes."""
    stuck = (
        "import threading, time; from notepad_jax import __main__, cli\n"
        "def fails(alone):\n"
        "    threading.Thread(target=time.sleep, args=(600,)).start()\n"
        "    print('said')\n"
        "    return 1\n"
        "cli.main = fails\n"
        "__main__.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", stuck, "check"], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, "said\n", "")


def test_letters_that_the_screen_lacks_do_not_cost_an_answer(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    parser.show("M\u00fcller")
    assert written.getvalue() == b"M\\xfcller\n"
