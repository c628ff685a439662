"""When the SGLang tests run, and how SGLang is made to start without an accelerator.

They run in the Python of their own environment (run_sglang_tests.sh). Any other Python skips them
with the reason, and with PEERCACHE_TEST_SGLANG=1 a missing environment is an error.
With PEERCACHE_TEST_TLS=1 every node and client of these tests has a certificate.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.integration import older_sglang

HERE = Path(__file__).parent
DEFAULT_VENV = (
    Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "peercache/sglang-0.5.23"
)
VENV = Path(os.environ.get("PEERCACHE_SGLANG_VENV") or DEFAULT_VENV)
HAVE_SGLANG = importlib.util.find_spec("sglang") is not None

if HAVE_SGLANG:
    sys.path.insert(0, str(HERE / "cpu_engine"))
    # No test has a model of a hub: without this, SGLang looks for one there for 40 s.
    os.environ["HF_HUB_OFFLINE"] = "1"
    with warnings.catch_warnings():
        # SGLang and torch warn at import; pytest's settings would make errors of that.
        warnings.simplefilter("ignore")
        if older_sglang.WANTED:
            older_sglang.prepare()
        import host_copies

        host_copies.prepare()
        from tests.integration import sglang_pools  # noqa: F401 - for its imports


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that need an engine; SGLang may warn."""
    for item in items:
        if HERE in item.path.parents and item.path.name.startswith("test_sglang"):
            item.add_marker(pytest.mark.sglang)
            item.add_marker(pytest.mark.filterwarnings("default"))
        for engine in ("lmcache", "vllm", "dynamo"):
            if HERE in item.path.parents and item.path.name.startswith(f"test_{engine}"):
                item.add_marker(engine)


if not HAVE_SGLANG:
    if os.environ.get("PEERCACHE_TEST_SGLANG") == "1" and not (VENV / "bin/python").exists():
        raise pytest.UsageError(
            f"PEERCACHE_TEST_SGLANG=1, and {VENV} is not there: run {HERE / 'install_sglang.sh'}"
        )

    class _WithoutSGLang(pytest.Module):
        """A test module that cannot even be imported here, shown as one skip."""

        def collect(self) -> list[pytest.Item]:
            pytest.skip(
                "needs SGLang: run tests/integration/run_sglang_tests.sh", allow_module_level=True
            )

    def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
        """Collect no SGLang test in a Python that has no SGLang."""
        if module_path.name.startswith("test_sglang"):
            return _WithoutSGLang.from_parent(parent, path=module_path)
        return pytest.Module.from_parent(parent, path=module_path)


if HAVE_SGLANG:
    from peercache.config.settings import DEFAULT_CLUSTER
    from peercache.trust.authority import CA_CERTIFICATE, Authority
    from peercache.trust.identity import CertificateRole, Identity
    from tests.integration.sglang_fakes import FakeBackedStore, FakeCluster

    @pytest.fixture(scope="session", autouse=True)
    def over_tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        """Give nodes and clients, here and in child processes, a certificate where that is asked.

        An engine that embeds its node has one certificate for both, and so have all of them here.
        """
        if os.environ.get("PEERCACHE_TEST_TLS") != "1":
            yield
            return
        folder = tmp_path_factory.mktemp("pki")
        authority = Authority.create(folder, DEFAULT_CLUSTER, timedelta(days=2))
        identity = Identity(DEFAULT_CLUSTER, CertificateRole.NODE, "tests")
        issued = authority.issue(identity, lifetime=timedelta(days=1))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PEERCACHE_TLS_CA", str(folder / CA_CERTIFICATE))
            patch.setenv("PEERCACHE_TLS_CERT", str(issued))
            patch.setenv("PEERCACHE_TLS_KEY", str(issued.with_suffix(".key")))
            yield

    @pytest.fixture(scope="session", autouse=True)
    def version_in_the_report(record_testsuite_property: Callable[[str, object], None]) -> None:
        """Write which SGLang these tests ran with."""
        from importlib.metadata import version

        from sglang.srt.mem_cache import hicache_storage

        record_testsuite_property("sglang", version("sglang"))
        record_testsuite_property("interface", hicache_storage.__file__)

    @pytest.fixture
    def cluster() -> FakeCluster:
        """Return an empty cluster, which stores built by name use."""
        FakeBackedStore.cluster = FakeCluster()
        return FakeBackedStore.cluster

    @pytest.fixture
    def open_rig(cluster: FakeCluster) -> Iterator[Callable[..., Any]]:
        """Return a function that opens rigs over the fake cluster; they are closed at the end."""
        from tests.integration.sglang_rig import Rig, Shape

        rigs: list[Rig] = []

        def build(extra_config: dict[str, Any] | None = None, **shape: Any) -> Rig:
            rigs.append(Rig(Shape(**shape), extra_config or {}, FakeBackedStore))
            return rigs[-1]

        yield build
        for rig in rigs:
            rig.close()
