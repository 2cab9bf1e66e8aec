"""Settings for all tests."""

from hypothesis import settings

settings.register_profile("lmswap", deadline=None)  # a busy machine is not a wrong result
settings.load_profile("lmswap")
