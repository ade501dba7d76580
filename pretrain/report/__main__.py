# SPDX-License-Identifier: Apache-2.0
"""`python -m pretrain.report RUN_DIR...` rewrites report.html."""

from pretrain.command_line import run_program
from pretrain.report.page import main

if __name__ == "__main__":
    run_program(main)
