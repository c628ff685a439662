"""Skips the tests of a module that imports this where the package was compiled without OpenSSL.

An installation from source leaves TLS out where OpenSSL's headers are missing, and reports it.
"""

import pytest

from peercache.installation.library import PACKAGE, TLS_LIBRARY

if not (PACKAGE / TLS_LIBRARY).exists():
    pytest.skip("compiled without OpenSSL: install libssl-dev", allow_module_level=True)
