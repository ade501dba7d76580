# SPDX-License-Identifier: Apache-2.0
"""report.html, one self-contained page that shows a run; `page` is the entry."""
