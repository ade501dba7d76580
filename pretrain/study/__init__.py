# SPDX-License-Identifier: Apache-2.0
"""Many runs as one experiment: which there are, where each is placed, and what they cost."""
