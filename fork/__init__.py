# SPDX-License-Identifier: Apache-2.0
"""Compose DeepSpeed with zero-sized parameters: upstream's release, plus the patch set in ``patches/``."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCAL_VERSION = "+zerosized.1"


class ForkError(Exception):
    """What went wrong and how to mend it, in one sentence for the person who ran the command."""
