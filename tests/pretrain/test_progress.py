# SPDX-License-Identifier: Apache-2.0
import io

import pytest

from pretrain.progress import Progress, short_count


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def row(step: int) -> dict:
    return {"step": step, "loss": 3.25, "tokens_per_s": 2345.0}


def test_plain_lines_where_there_is_no_terminal():
    stream = io.StringIO()
    progress = Progress(25, interval=10, stream=stream)
    for step in range(1, 26):
        progress.update(row(step))
    progress.message("saved step 25")
    progress.close()
    lines = stream.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "step 1/25",
        "step 10/25",
        "step 20/25",
        "step 25/25",
        "saved step 25",
    ]
    assert lines[1].startswith("step 10/25  loss 3.2500  2.35 k tokens/s  left ")
    assert lines[3].endswith("left 00:00")


def test_a_bar_on_a_terminal_shows_step_loss_speed_and_time_left():
    stream = Terminal()
    progress = Progress(20, first_step=10, stream=stream)
    for step in range(11, 21):
        progress.update(row(step))
    progress.message("a line of its own")
    progress.close()
    shown = stream.getvalue()
    last = shown.rstrip("\n").split("\r")[-1]
    assert "step 10/20" in shown
    assert "a line of its own\n" in shown
    assert "step 20/20" in last
    assert "loss 3.2500  2.35 k tokens/s  left 00:00" in last


def test_continued_run_estimates_from_its_own_steps(monkeypatch):
    now = iter([0.0, 5.0])
    monkeypatch.setattr("pretrain.progress.time.monotonic", lambda: next(now))
    stream = io.StringIO()
    progress = Progress(1110, first_step=1000, interval=10, stream=stream)
    progress.update(row(1010))
    assert stream.getvalue().rstrip().endswith("left 00:50")


@pytest.mark.parametrize("options", [{"enabled": False}, {"style": "none"}])
def test_quiet(options):
    stream = Terminal()
    progress = Progress(2, stream=stream, **options)
    progress.update(row(1))
    progress.message("x")
    progress.close()
    assert stream.getvalue() == ""


def test_a_closed_log_does_not_stop_the_run():
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    progress = Progress(2, style="lines", stream=Full())
    progress.update(row(1))
    progress.message("x")
    progress.close()


@pytest.mark.parametrize(
    ("value", "text"), [(12.0, "12"), (1234.0, "1.23 k"), (2.5e6, "2.5 M"), (7e12, "7 T")]
)
def test_short_count(value, text):
    assert short_count(value) == text
