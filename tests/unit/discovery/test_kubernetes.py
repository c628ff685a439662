"""What is asked of the Kubernetes API, and what is said when it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from peercache.discovery.kubernetes import ApiServer
from peercache.discovery.port import SourceFailed
from peercache.errors import ConfigError
from tests.contracts.source_fakes import FakeKubernetes, forbidden, status_of
from tests.pace import ends_within


@pytest.fixture
def api(tmp_path: Path) -> FakeKubernetes:
    """An API server with one service of one pod."""
    fake = FakeKubernetes(tmp_path)
    fake.has(["10.1.0.1"])
    return fake


class _Enough(Exception):
    """Ends a source that works."""


async def first_of(api: FakeKubernetes, text: str = "k8s://peercache") -> list[str]:
    """Return the first answer of a source, or raise what it fails with."""
    found: list[str] = []

    def take(addresses: object) -> None:
        found.extend(addresses)  # type: ignore[call-overload]
        raise _Enough

    with ends_within():
        async with trio.open_nursery() as nursery:
            await api.start(nursery)
            failed: Exception | None = None
            try:
                await api.source(text).follow(take)
            except _Enough:
                pass
            except SourceFailed as error:
                failed = error
            nursery.cancel_scope.cancel()
    if failed is not None:
        raise failed
    return found


async def failure(api: FakeKubernetes, text: str = "k8s://peercache") -> str:
    """Return what a source fails with: one line."""
    try:
        await first_of(api, text)
    except SourceFailed as failed:
        said = str(failed)
        assert "\n" not in said
        return said
    raise AssertionError("it did not fail")


async def test_port_is_the_one_that_is_named_control(api: FakeKubernetes) -> None:
    """The entry's own port wins; a single port needs no name; none is the default."""
    assert await first_of(api) == ["10.1.0.1:31998"]
    assert await first_of(api, "k8s://peercache:5") == ["10.1.0.1:5"]
    api.slices[0]["ports"] = [{"name": "", "port": 7}]
    assert await first_of(api) == ["10.1.0.1:7"]
    api.slices[0]["ports"] = None
    assert await first_of(api, "k8s://peercache.serving") == ["10.1.0.1:31998"]


async def test_pods_that_start_are_given_and_those_that_end_are_not(api: FakeKubernetes) -> None:
    """A node is ready only when it has joined, and it joins by being found."""
    api.has(["10.1.0.1", "10.1.0.2", "10.1.0.3"])
    ends = api.slices[0]["endpoints"]
    ends[0]["conditions"] = {"ready": False, "serving": False, "terminating": False}
    ends[1]["conditions"] = {"ready": False, "serving": True, "terminating": True}
    ends[2]["conditions"] = {}
    api.slices.append({**api.slices[0], "addressType": "FQDN"})
    api.slices.append(
        {**api.slices[0], "addressType": "IPv6", "endpoints": [{"addresses": ["fd00::7"]}]}
    )

    assert await first_of(api) == ["10.1.0.1:31998", "10.1.0.3:31998", "[fd00::7]:31998"]


async def test_token_is_read_again_for_every_question(api: FakeKubernetes) -> None:
    """Kubernetes replaces it every hour."""
    assert await first_of(api)
    api.token("second")

    assert await first_of(api)
    assert api.web.requests[-1][1]["authorization"] == "Bearer second"


async def test_refusals_say_what_to_do(api: FakeKubernetes) -> None:
    """RBAC, a bad token, an old cluster, a service that is not there."""
    api.refusal = forbidden("list")
    said = await failure(api)
    assert "cannot list resource" in said
    assert said.endswith(
        "let the pod's service account get, list and watch endpointslices of the group "
        "discovery.k8s.io in the namespace serving"
    )
    api.refusal = status_of(404, "NotFound", "the server could not find the requested resource")
    assert "Kubernetes 1.21 or later" in await failure(api)
    api.refusal = None
    assert "no EndpointSlice of a service misspelt" in await failure(api, "k8s://misspelt")
    api.expected = "another"
    assert "the pod's token is not valid" in await failure(api)


async def test_watch_that_is_refused_is_reported_too(api: FakeKubernetes) -> None:
    """A role that may list and not watch would otherwise be asked without end."""
    api.refuses_to_watch = True
    with ends_within():
        async with trio.open_nursery() as nursery:
            await api.start(nursery)
            with pytest.raises(SourceFailed, match=r"refuses to watch .403.*get, list and watch"):
                await api.source().follow(lambda addresses: None)
            nursery.cancel_scope.cancel()


async def test_api_that_cannot_prove_its_name_gets_no_token(
    api: FakeKubernetes, tmp_path: Path
) -> None:
    """Another authority's certificate is refused before anything is asked."""
    (tmp_path / "other").mkdir()
    other = FakeKubernetes(tmp_path / "other")
    (tmp_path / "ca.crt").write_bytes((tmp_path / "other" / "ca.crt").read_bytes())
    other.end()

    assert "certificate verify failed" in await failure(api)
    assert not api.web.requests


@pytest.mark.parametrize("name", ["ca.crt", "token", "namespace"])
async def test_missing_file_of_the_account_is_named(api: FakeKubernetes, name: str) -> None:
    """It comes with the service account of a pod."""
    (api.account / name).unlink()

    said = await failure(api)

    assert f"cannot use {api.account / name}" in said
    assert "automountServiceAccountToken" in said


def test_outside_a_pod_the_setting_is_an_error() -> None:
    """It reports it at the start, and names what works there."""
    with pytest.raises(ConfigError, match=r"works in a pod only.*use dns:// or addresses"):
        ApiServer.of_this_pod("k8s://peercache", {})
    found = ApiServer.of_this_pod(
        "k8s://x", {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "6443"}
    )
    assert (found.host, found.port) == ("10.96.0.1", 6443)
