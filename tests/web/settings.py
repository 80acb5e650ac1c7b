"""The product's settings, with a data folder of the test run's own: they read it once, when they are imported."""

import atexit
import os
import shutil
import tempfile

os.environ["SPECPILOT_DATA"] = tempfile.mkdtemp(prefix="specpilot-tests-")
atexit.register(shutil.rmtree, os.environ["SPECPILOT_DATA"], ignore_errors=True)
for _name in ("DATABASE_URL", "REDIS_URL", "SPECPILOT_PERFORM", "SPECPILOT_LEASE_SECONDS"):
    os.environ.pop(_name, None)

from webapp.config.settings import *  # noqa: E402, F403

PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]  # fast
