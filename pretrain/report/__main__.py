# SPDX-License-Identifier: Apache-2.0
"""`python -m pretrain.report RUN_DIR...` rewrites report.html."""

import sys

from pretrain.report.page import main

if __name__ == "__main__":
    sys.exit(main())
