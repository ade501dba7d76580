# SPDX-License-Identifier: Apache-2.0
"""The one exception for what a user set wrongly."""

from collections.abc import Iterable


class ConfigError(ValueError):
    """Settings that cannot work. Each problem names the rule, the value and what to do.

    Programs print the problems, one a line, and exit with status 2 without a stack trace.
    """

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        assert self.problems, "a ConfigError without a problem says nothing"
        super().__init__("\n".join(self.problems))
