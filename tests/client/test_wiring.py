"""The wiring of a client: what becomes of its lock when the folder is in a bad way."""

from __future__ import annotations

import os
import tempfile

import pytest

from peercache.client.wiring import Wiring
from peercache.config import Config
from peercache.errors import ConfigError
from peercache.keys import Namespace
from peercache.segment.client_lock import folder_of, lock_name


def test_a_lock_that_cannot_be_renewed_closes_no_descriptor_of_others() -> None:
    """Each try fails alike, and the first that can be made works."""
    with tempfile.TemporaryDirectory(prefix="peercache-") as place:
        home = f"ipc://{place}/n.ipc"
        wiring = Wiring(Config.load({"home": home}), Namespace())
        folder = folder_of(home)
        (folder / lock_name(wiring.identity)).unlink()
        folder.rmdir()
        folder.write_text("in the way")

        with pytest.raises(ConfigError):
            wiring._renew_lock()
        # They take the number that the old lock had.
        others = [os.open(os.devnull, os.O_RDONLY) for _ in range(8)]
        with pytest.raises(ConfigError):
            wiring._renew_lock()
        for descriptor in others:
            os.fstat(descriptor)
            os.close(descriptor)

        folder.unlink()
        wiring._renew_lock()
        assert (folder / lock_name(wiring.identity)).exists()
        wiring.close(is_quiet=True)
        assert not folder.exists()
