# SPDX-License-Identifier: Apache-2.0
"""One toy trained in every layout from one checkpoint, and compared with one process."""
