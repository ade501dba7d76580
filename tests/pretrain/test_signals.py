# SPDX-License-Identifier: Apache-2.0
"""The first signal asks, the second ends, and former handlers come back."""

import signal
import subprocess
import sys

from pretrain.signals import StopSignals
from tests.distributed import ROOT


def test_first_signal_only_asks(capfd):
    former = signal.getsignal(signal.SIGTERM)
    with StopSignals() as signals:
        assert signals.received is None
        signal.raise_signal(signal.SIGTERM)
        assert signals.received is signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is former
    assert "once more exits at once" in capfd.readouterr().err


def test_second_signal_exits_at_once():
    code = (
        "import signal\n"
        "from pretrain.signals import StopSignals\n"
        "with StopSignals():\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "    print('still here', flush=True)\n"
        "    signal.raise_signal(signal.SIGTERM)\n"
        "    print('not here')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 128 + signal.SIGTERM
    assert done.stdout == "still here\n"
    assert "without saving" in done.stderr
