"""What every test shares: a mark in the environment by which anything left behind is found."""

from __future__ import annotations

import os
import secrets

os.environ["SKYWARD_TEST_RUN"] = secrets.token_hex(8)
