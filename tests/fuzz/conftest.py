"""How long is fuzzed, and where examples are kept: seconds in `make test`, ten minutes in `make soak`."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase, ReadOnlyDatabase

SECONDS = int(os.environ.get("SKYWARD_FUZZ_SECONDS", "0"))
"""About how long all properties together are tried; 0 is a few seconds."""

# a plain run of the tests changes no file of the repository
_KEPT = DirectoryBasedExampleDatabase(Path(__file__).parent / "corpus")

settings.register_profile(
    "fuzz",
    max_examples=SECONDS * 2 or 60,  # sixty of each property take half a minute
    database=_KEPT if SECONDS else ReadOnlyDatabase(_KEPT),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
