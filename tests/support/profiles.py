"""Number of hypothesis examples: 200, equal in every run, or 2,000 new ones with HYPOTHESIS_PROFILE=long."""

import os

from hypothesis import HealthCheck, settings

QUIET = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck), "print_blob": True}
PROFILES = {
    "short": settings(max_examples=200, derandomize=True, **QUIET),
    "long": settings(max_examples=2000, derandomize=False, **QUIET),
}
PROFILE = PROFILES[os.environ.get("HYPOTHESIS_PROFILE", "short")]
